"""Makes the small checkpoints of the quickstart and the tests: MiMo's, a Qwen2 trunk and one MTP layer, or any other
family's that transformers builds.

``python -m asyncrl.models.make_checkpoint --out checkpoints/arith-mimo`` writes a Hugging Face folder: config.json,
model.safetensors, a tokenizer trained on the task's text, and generation_config.json. Random weights are warm-started
on demonstrations (an import path, by default the arithmetic task's), so that the model answers in the task's format and
about a third of its answers are right. ``asyncrl.data.guess`` has those of a model that calls a tool.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.models.checkpoint import save_checkpoint, tensor_shapes
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.tokenizer import train_tokenizer
from asyncrl.models.warm_start import Demonstration, warm_start
from asyncrl.plugins.import_path import ImportPathError, load
from asyncrl.types.prompts import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from asyncrl.models.scoring import ScoringModel

MIMO = "mimo"  # built by the native decoder
INIT_STD = 0.06
#: of MiMo's config, what other families take from it
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings bos_token_id eos_token_id pad_token_id"
).split()
LAYERS = 4  # trunk layers
WARM_START_STEPS = 700  # batches of BATCH_SIZE demonstrations
CAREFUL_SHARE = 0.75  # share of error-free demonstrations, which come first
BATCH_SIZE = 16
TOKENIZER_TEXTS = 1000  # number of demonstrations on which the tokenizer is trained
VOCAB_MULTIPLE = 64  # the vocabulary is padded to a multiple of this, so that tensor parallelism divides it evenly


def model_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The config.json. head_dim is 32, the smallest that the engines' CPU attention kernels support."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "torch_dtype": "float32",
    }


def make_checkpoint(
    out: str | Path,
    seed: int = 0,
    warm_start_steps: int = WARM_START_STEPS,
    demonstrations: str = "asyncrl.data.arithmetic:demonstrations",
    layers: int = LAYERS,
    tokens: str | None = None,
    model_type: str = MIMO,
    model_options: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint folder and return its path; the same arguments give the same weights.

    ``demonstrations``: import path of a function (seed, careful: bool) that returns an endless iterator of (chat
    messages, response) or, where tools are on offer, (chat messages, response, tools), such as
    `asyncrl.data.arithmetic.demonstrations` and `asyncrl.data.guess.demonstrations`. ``tokens``: import path of texts
    that are one token each. ``model_type``: a family, by transformers' name, in the same size;
    ``model_options``: of its config.json. Raises ImportPathError, and CheckpointError for an unknown family.
    """
    folder = Path(out)
    source = load(demonstrations)
    tokenizer = train_tokenizer(
        (
            f"{message['role']}\n{message['content']}\nassistant\n{response}"
            for messages, response, *_ in islice(source(0, True), TOKENIZER_TEXTS)  # one vocabulary for all seeds
            for message in messages
        ),
        tokens=load(tokens) if tokens is not None else (),
    )
    raw = model_config(tokenizer) | {"num_hidden_layers": layers}
    model: Decoder | ScoringModel
    if model_type == MIMO:
        model = Decoder(DecoderConfig.from_dict(raw))
        model.init_weights(seed, std=INIT_STD)
    else:
        model = _transformers_model(model_type, raw, model_options or {}, seed)
    enlarge_embeddings(model)
    careful_steps = int(CAREFUL_SHARE * warm_start_steps)
    careful = islice(source(seed, True), careful_steps * BATCH_SIZE)
    study = _encoded(chain(careful, source(seed, False)), tokenizer)
    warm_start(model, study, warm_start_steps, BATCH_SIZE, decay_steps=warm_start_steps - careful_steps)

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    # last: for the Makefile, model.safetensors marks a complete folder
    if isinstance(model, Decoder):
        save_checkpoint(folder, dict(model.named_parameters()), model.config)
    else:
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def enlarge_embeddings(model: Decoder | ScoringModel) -> None:
    """Scale weights of Normal(0, `INIT_STD`) so that a narrow model learns in seconds: unit-size embeddings, to which
    layers add little at first. With the usual Normal(0, 0.02) the layers' outputs would drown the embeddings."""
    # some families scale what their embeddings hold
    scale = 1.0 if isinstance(model, Decoder) else float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
    for name, p in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            p.div_(INIT_STD * scale)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            p.mul_(0.5)


@torch.no_grad()
def _transformers_model(model_type: str, raw: Mapping[str, Any], options: Mapping[str, Any], seed: int) -> ScoringModel:
    """A family's model in the sizes of ``raw``: matrices from Normal(0, `INIT_STD`), the rest as the family starts."""
    # takes seconds to import
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    from asyncrl.models.causal_lm import choose_attention
    from asyncrl.models.scoring import scoring

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"model type {model_type!r}: expected {MIMO}, or a causal language model in transformers")
    config = CONFIG_MAPPING[model_type](**{name: raw[name] for name in SIZES}, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train(False)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.dim() >= 2:
            p.copy_(torch.randn(p.shape, generator=generator) * INIT_STD)
    return scoring(model, attention=choose_attention(model, "auto", False))


def _encoded(
    demonstrations: Iterator[tuple[list[Message], str, *tuple[Any, ...]]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[Demonstration]:
    for messages, response, *tools in demonstrations:
        offered = tools[0] if tools else None
        prompt = tokenizer.apply_chat_template(messages, offered, add_generation_prompt=True, tokenize=False)
        yield Demonstration(
            tokenizer.encode(prompt, add_special_tokens=False),
            [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id],
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder; created if missing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-start-steps", type=int, default=WARM_START_STEPS, help="0: random weights")
    parser.add_argument(
        "--demonstrations",
        default="asyncrl.data.arithmetic:demonstrations",
        help="import path of a function (seed, careful) that returns an endless iterator of (chat messages, response) "
        "or (chat messages, response, tools)",
    )
    parser.add_argument("--tokens", help="import path of texts that are one token each")
    parser.add_argument("--layers", type=int, default=LAYERS, help="number of trunk layers")
    parser.add_argument(
        "--model-type", default=MIMO, help="mimo, or a family by transformers' name, such as gemma3_text or olmo2"
    )
    parser.add_argument(
        "--model-options", type=json.loads, help='JSON object of its config.json, such as {"sliding_window": 64}'
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # one summation order on every machine
    try:
        folder = make_checkpoint(
            args.out,
            args.seed,
            args.warm_start_steps,
            args.demonstrations,
            args.layers,
            args.tokens,
            args.model_type,
            args.model_options,
        )
    except (CheckpointError, ImportPathError) as e:
        parser.error(str(e))
    parameters = sum(math.prod(shape) for shape in tensor_shapes(folder).values())
    print(f"{folder}: {parameters:,} parameters, warm-started for {args.warm_start_steps} steps, seed {args.seed}")


if __name__ == "__main__":
    main()
