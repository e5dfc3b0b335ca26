"""Converts prompts to token ids and responses to text, with the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import copyreg
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.models.config import CheckpointError, ModelConfig
from asyncrl.types.prompts import Message, Prompt


class PromptTokenizer:
    """Tokenizer of a checkpoint, checked against its model.

    ``stop_token_ids`` are the tokens that end a response, ascending: the tokenizer's EOS, those of
    generation_config.json (of config.json if it names none, as in transformers), and ``more_stop_token_ids``. Many
    checkpoints end a turn with a token other than the tokenizer's EOS. Every engine stops at these and no others.

    Raises CheckpointError if the tokenizer is missing, broken or larger than the model's embeddings, or if a stop token
    is outside the model's vocabulary."""

    def __init__(
        self,
        checkpoint: str | Path,
        apply_chat_template: bool = True,
        more_stop_token_ids: Sequence[int] = (),
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoTokenizer  # takes 3 s, most of them for torch and parts that generate

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=trust_remote_code)
        except Exception as e:  # transformers raises many types
            raise CheckpointError(f"{checkpoint}: the tokenizer does not load ({type(e).__name__}: {e})") from None
        vocabulary = ModelConfig.load(checkpoint).vocab_size
        if len(self.hf) > vocabulary:
            raise CheckpointError(
                f"{checkpoint}: the tokenizer has {len(self.hf)} tokens, the model {vocabulary} embeddings; they do "
                "not belong together"
            )
        if apply_chat_template and not self.hf.chat_template:
            raise CheckpointError(
                f"{checkpoint}: the tokenizer has no chat template; set data.apply_chat_template=false to join messages"
            )
        self._apply_chat_template, self._vocabulary = apply_chat_template, vocabulary
        self._arguments = (checkpoint, apply_chat_template, more_stop_token_ids, trust_remote_code)
        ends = {*more_stop_token_ids, *_eos_token_ids(Path(checkpoint))}
        if self.hf.eos_token_id is not None:
            ends.add(int(self.hf.eos_token_id))
        if outside := [token for token in sorted(ends) if not 0 <= token < vocabulary]:
            raise CheckpointError(
                f"{checkpoint}: stop token {outside[0]} is not one of the model's {vocabulary} tokens; check "
                "generation_config.json and rollout.stop_token_ids"
            )
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(ends))

    def __reduce__(self) -> tuple[Any, ...]:
        """Needs neither AutoTokenizer nor torch where it arrives; loaded again there if its class is the checkpoint's
        own, or not of the library `tokenizers`."""
        from transformers import PreTrainedTokenizerFast

        if isinstance(self.hf, PreTrainedTokenizerFast) and type(self.hf).__module__.startswith("transformers."):
            return copyreg.__newobj__, (PromptTokenizer,), vars(self)  # type: ignore[attr-defined]
        return PromptTokenizer, self._arguments

    @classmethod
    def of(cls, config: Config) -> PromptTokenizer:
        """The tokenizer of a run's model."""
        model, data = config.model, config.data
        return cls(model.path, data.apply_chat_template, config.rollout.stop_token_ids, model.trust_remote_code)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Token ids, int32 [P]: of raw text unchanged, of messages in the chat template with a generation prompt."""
        if prompt.text is not None:
            ids = self.hf.encode(prompt.text, add_special_tokens=True)
        elif self._apply_chat_template:
            ids = self.hf.encode(chat_text(self.hf, prompt.messages), add_special_tokens=False)
        else:
            ids = self.hf.encode("".join(str(m["content"]) for m in prompt.messages), add_special_tokens=True)
        return np.asarray(ids, dtype=np.int32)

    def in_vocabulary(self, tokens: np.ndarray) -> bool:
        """True if all tokens are in the model's vocabulary, a precondition of decoding."""
        return not len(tokens) or bool(tokens.min() >= 0 and tokens.max() < self._vocabulary)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text without special tokens, as reward functions get it."""
        return self.hf.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)

    def decode_batch(self, tokens: Sequence[np.ndarray], special_tokens: bool = False) -> list[str]:
        return self.hf.batch_decode([t.tolist() for t in tokens], skip_special_tokens=not special_tokens)


def chat_text(
    hf: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    prompts: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """A conversation as a tokenizer's chat template renders it; with ``prompts``, up to where an answer begins.
    ``variables``: further ones of the template. Raises what the template raises, which may be anything."""
    return str(
        hf.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompts, **variables
        )
    )


def _eos_token_ids(checkpoint: Path) -> list[int]:
    """``eos_token_id`` (a number or a list) of generation_config.json, else of config.json. Raises CheckpointError."""
    for name in ("generation_config.json", "config.json"):
        if (file := checkpoint / name).is_file():
            try:
                found = json.loads(file.read_bytes()).get("eos_token_id")
                if found is not None:
                    return [int(token) for token in (found if isinstance(found, list) else [found])]
            except (ValueError, TypeError, AttributeError) as e:  # malformed text or structure
                raise CheckpointError(
                    f"{file}: expected a JSON object, and in it a token or a list of tokens as eos_token_id if there "
                    f"is one ({e})"
                ) from None
    return []
