"""The forward pass of the native decoder for a causal LM of transformers: packed tokens in, logprobs of targets out.

Shape suffixes: T packed tokens, L those of a sequence, R rows, C a chunk of them, M hidden size, V vocabulary, E
experts, N tokens of all layers, K the experts of a token.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.models.causal_lm import layers
from asyncrl.models.chunked import TargetScores, head_logits
from asyncrl.models.config import CheckpointError
from asyncrl.models.decoder import DraftTargets, TokenScores
from asyncrl.models.kernels import fuses
from asyncrl.models.layout import PackedLayout

#: nats between two ways to compute a token's logprob, on average over a sequence, in float32 and in bfloat16, which
#: has 0.1 where logits are large
MAY_DIFFER = (0.01, 0.3)


class ScoringModel(PreTrainedModel):
    """Mixed into a causal LM's class by `scoring`: its forward pass becomes that of `asyncrl.models.decoder.Decoder`.

    The sequences of a micro-batch are the rows of a batch padded at its end. So causal attention needs no mask between
    sequences, and convolutions and recurrent layers carry nothing from one to the next. With ``packs`` (flash
    attention) they are a single row instead, told apart by their positions.

    The model's own head computes the logits, a chunk of rows at a time, with what its family does to them: caps,
    scales, biases."""

    packs: bool
    balances_experts: bool

    def forward(  # type: ignore[override]
        self,
        tokens_T: Tensor,
        layout: PackedLayout,
        rows_R: Tensor,
        targets_R: Tensor,
        temperature: float,
        chunk: int = 1024,
        drafts: Sequence[DraftTargets] = (),
        *_: Any,
    ) -> TokenScores:
        """As `Decoder.forward`, without drafts."""
        if drafts:
            raise ValueError("a model of transformers has no draft")
        hidden_TM, balance = self._states(tokens_T, layout)
        hidden_RM = hidden_TM.index_select(0, rows_R)
        if fuses(hidden_RM):
            chunk *= 2  # whose logits are half as wide, or have no copies
        parts = [
            _recomputed(self._scores, hidden_RM[lo : lo + chunk], targets_R[lo : lo + chunk], temperature)
            for lo in range(0, len(rows_R), chunk)
        ]
        logprobs, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
        return TokenScores(logprobs, entropy, hidden_TM.detach(), balance=balance)

    def plain_logprobs(self, tokens_L: Tensor) -> Tensor:
        """float32 [L−1]: log-probability of each token of a sequence but the first, as transformers computes them."""
        logits_LV = super().forward(input_ids=tokens_L[None], use_cache=False).logits[0].float()
        return logits_LV[:-1].log_softmax(-1).gather(1, tokens_L[1:, None]).squeeze(1)

    def _states(self, tokens_T: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor | None]:
        """What the head reads, [T, M]; and `balance_loss` times its coefficient, if config.json asks for it."""
        options: dict[str, Any] = {"use_cache": False}
        if self.balances_experts:
            options["output_router_logits"] = True
        trunk = _trunks(self)[-1]
        if self.packs:
            out = trunk(tokens_T[None], position_ids=layout.positions[None], **options)
            unpad: Callable[[Tensor], Tensor] = lambda x: x.reshape(-1, x.shape[-1])
        else:
            out = trunk(layout.pad(tokens_T), **options)
            unpad = lambda x: layout.unpad(x.reshape(layout.batch, layout.length, x.shape[-1]))
        balance = None
        if self.balances_experts:
            text = self.config.get_text_config()
            logits = [unpad(layer) for layer in out.router_logits]
            balance = text.router_aux_loss_coef * balance_loss(logits, text.num_experts_per_tok)
        return unpad(out.last_hidden_state), balance

    def _scores(self, hidden_CM: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return TargetScores.apply(self._head(hidden_CM), targets_C, temperature)

    def _head(self, hidden_CM: Tensor) -> Tensor:
        """Logits [C, V]; in float32, unless a kernel reads them."""
        tokens = hidden_CM.new_zeros(1, len(hidden_CM), dtype=torch.long)
        with _returning(hidden_CM[None], _trunks(self)):
            logits_CV = super().forward(input_ids=tokens, use_cache=False).logits[0]
        return logits_CV if fuses(logits_CV) else logits_CV.float()


def scoring(
    model: PreTrainedModel, *, attention: str, float32_head: bool = False, activation_checkpointing: bool = False
) -> ScoringModel:
    """``model``, changed in place: with the forward pass of `ScoringModel`. ``attention``: as `choose_attention`
    returns it."""
    model.set_attn_implementation(attention)
    if float32_head:
        head = cast(nn.Linear, model.get_output_embeddings())
        head.forward = functools.partial(_float32_logits, head)  # type: ignore[method-assign]
    if activation_checkpointing:
        for layer in layers(model):
            layer.forward = functools.partial(_recomputed, layer.forward)  # type: ignore[method-assign]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # a token like any other here; it would get no gradient
    cls = type(model)
    model.__class__ = type(cls.__name__, (ScoringModel, cls), {"__module__": cls.__module__})
    scored = cast(ScoringModel, model)
    scored.packs = attention.startswith("flash")
    scored.balances_experts = bool(getattr(model.config.get_text_config(), "output_router_logits", False))
    return scored


def balance_loss(router_logits_TE: Sequence[Tensor], chosen: int) -> Tensor:
    """Scalar that is smallest if all experts get as many tokens: E · Σᵢ fᵢ · Pᵢ, where fᵢ is the number of times that
    expert i is among the ``chosen`` ones of a token, divided by the number of tokens, and Pᵢ its mean probability, over
    the tokens of all layers (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6)."""
    probabilities_NE = torch.cat(list(router_logits_TE)).float().softmax(-1)
    experts_NK = probabilities_NE.topk(chosen, -1).indices
    share_E = experts_NK.flatten().bincount(minlength=probabilities_NE.shape[1]) / len(probabilities_NE)
    return (share_E * probabilities_NE.mean(0)).sum() * len(share_E)


@torch.no_grad()
def check_scores(model: ScoringModel, path: str, device: torch.device, bfloat16: bool) -> None:
    """Compare the logprobs of a few random tokens, scored together, with those that transformers computes for each
    sequence alone with eager attention. Raises CheckpointError for a model whose code does not allow it."""
    generator, attention = torch.Generator().manual_seed(0), model.config._attn_implementation
    vocabulary = model.config.get_text_config().vocab_size
    lengths = np.array([12, 7])
    tokens = [torch.randint(vocabulary, (n,), generator=generator).to(device) for n in lengths]
    rows = torch.cat([torch.arange(11), torch.arange(12, 18)]).to(device)
    targets = torch.cat([sequence[1:] for sequence in tokens])
    scores = model(torch.cat(tokens), PackedLayout.from_lengths(lengths, device), rows, targets, 1.0)
    model.set_attn_implementation("eager")
    try:
        plain = torch.cat([model.plain_logprobs(sequence) for sequence in tokens])
    finally:
        model.set_attn_implementation(attention)
    differences = (scores.logprobs - plain).abs().split((lengths - 1).tolist())
    difference, allowed = max(float(each.mean()) for each in differences), MAY_DIFFER[bfloat16]
    if not difference <= allowed:
        raise CheckpointError(
            f"{path}: together, sequences get other logprobs than each of them alone: they differ by {difference:.2f} "
            f"nats on average, expected at most {allowed}; {type(model).__name__.removeprefix('FSDP')} cannot be "
            f"trained with {attention} attention; try model.attention=eager"
        )


class _Output(dict[str, Tensor]):
    """Output of a trunk that has nothing but its last hidden state."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self.get(name)

    def __getitem__(self, key: Any) -> Tensor:  # by name, or the first by its place
        return super().__getitem__("last_hidden_state" if isinstance(key, int) else key)


@contextlib.contextmanager
def _returning(hidden_1CM: Tensor, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which each of ``modules`` returns these states, whatever its input is."""
    for module in modules:
        module.forward = lambda *_, **__: _Output(last_hidden_state=hidden_1CM)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _trunks(model: PreTrainedModel) -> list[nn.Module]:
    """The model without its head, and its decoder of text if that is a part of it: families call either."""
    inner = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    found: list[nn.Module] = [model.base_model, model.get_decoder(), *inner[:1]]
    return [part for part in dict.fromkeys(found) if part is not model][:2]


def _recomputed(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call a function whose activations are computed again in the backward pass."""
    if torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False, **options)
    return function(*inputs, **options)


def _float32_logits(head: nn.Linear, x: Tensor) -> Tensor:
    logits = head_logits(x.flatten(0, -2), head.weight, float32=True).view(*x.shape[:-1], -1)
    return logits if head.bias is None else logits + head.bias.float()
