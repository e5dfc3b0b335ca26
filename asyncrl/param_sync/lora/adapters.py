"""Names, shapes and checks of LoRA adapters in a manifest.

Canonical names are those of PEFT checkpoints: ``base_model.model.<module path>.lora_A.weight``. With a frozen base a
replica receives the base in its first sync, then only the adapter and the draft.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.schema import LoraConfig
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, ManifestError, TensorSpec, is_adapter

#: the shape [out, in] of each module's weight, by the module's canonical path (``model.layers.0.self_attn.q_proj``)
ModuleShapes = Mapping[str, tuple[int, int]]

_PREFIX = "base_model.model."


def adapter_spec(lora: LoraConfig, modules: ModuleShapes, dtype: str) -> AdapterSpec:
    """The adapter that a config describes, for a model with these ``modules``. Raises ManifestError for a target module
    that no module's path ends with."""
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    targets = leaves if "all-linear" in lora.target_modules else lora.target_modules
    if unknown := [target for target in targets if not any(f".{m}".endswith(f".{target}") for m in modules)]:
        raise ManifestError(
            f"{', '.join(unknown)}: no linear layer of the model's trunk ends with it; they end with "
            f"{', '.join(leaves)}; or use all-linear"
        )
    return AdapterSpec("policy", lora.rank, lora.alpha, tuple(targets), dtype)


def adapter_shapes(module: str, weight: tuple[int, int], r: int, embedding: bool = False) -> dict[str, tuple[int, int]]:
    """Names and shapes of the pair A [r, in], B [out, r] for a module's weight [out, in]. For an embedding, with its
    weight [tokens, dim]: A [r, tokens], B [dim, r]."""
    rows, columns = weight
    if embedding:
        return {f"{_PREFIX}{module}.lora_embedding_A": (r, rows), f"{_PREFIX}{module}.lora_embedding_B": (columns, r)}
    return {f"{_PREFIX}{module}.lora_A.weight": (r, columns), f"{_PREFIX}{module}.lora_B.weight": (rows, r)}


def module_of(name: str) -> str:
    """Path of the module that an adapter's tensor adapts."""
    return name.removeprefix(_PREFIX).partition(".lora_")[0]


def target_pairs(manifest: Manifest, modules: ModuleShapes) -> dict[str, dict[str, tuple[int, int]]]:
    """Names and shapes of the pair of each module that the manifest's adapter targets, by module. A pair is an
    embedding's if the manifest names one for this module."""
    if manifest.adapter is None:
        return {}
    named = {t.name for t in manifest}
    pairs = {}
    for module, weight in modules.items():
        if manifest.adapter.targets(module):
            embedding = adapter_shapes(module, weight, manifest.adapter.r, embedding=True)
            plain = adapter_shapes(module, weight, manifest.adapter.r)
            pairs[module] = plain if named.isdisjoint(embedding) else embedding
    return pairs


def check_adapter(manifest: Manifest, modules: ModuleShapes, side: str = "the replica") -> None:
    """Raises ManifestError unless the manifest's adapter is complete: both tensors of every target module among the
    ``modules`` of ``side``, in the shapes that fit its weight, and no others."""
    spec = manifest.adapter
    sent = {t.name: t for t in manifest.sent() if is_adapter(t.name)}
    if spec is None:
        raise ManifestError(
            f"{side} takes a LoRA adapter, but the sender's manifest has none (and {len(sent)} adapter tensors); send "
            "the whole adapter with its name, rank, alpha, target modules and dtype, or turn LoRA off"
        )
    wanted = {name: shape for pair in target_pairs(manifest, modules).values() for name, shape in pair.items()}
    problems = [
        f"{target}: a target module of the sender, but {side} has none of this name"
        for target in spec.target_modules
        if not any(f".{module}".endswith(f".{target}") for module in modules)
    ]
    problems += [f"{name}: expected by {side}, but not sent" for name in wanted if name not in sent]
    problems += [f"{name}: sent, but no target module of {side} takes it" for name in sent if name not in wanted]
    for name, shape in wanted.items():
        takes = TensorSpec(name, spec.dtype, shape)
        if name in sent and sent[name] != takes:
            problems.append(f"{name}: sent as {_described(sent[name])}, {side} takes {_described(takes)}")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ManifestError(
            f"adapter {spec.name} (r {spec.r}) is incomplete or does not fit {side}, {len(problems)} differ: "
            f"{'; '.join(problems[:4])}{more}. Both sides must have the same rank, targets and base model"
        )


def check_lora(manifest: Manifest, modules: ModuleShapes | None, needs_base: bool) -> None:
    """Raises ManifestError for an adapter that is incomplete or that a replica with ``modules`` (None: LoRA off)
    refuses, and for a missing base."""
    if modules is not None:
        check_adapter(manifest, modules)
    elif (count := sum(is_adapter(t.name) for t in manifest)) or manifest.adapter is not None:
        name = "" if manifest.adapter is None else f" of adapter {manifest.adapter.name}"
        raise ManifestError(
            f"the sender sends {count} adapter tensors{name}, but the replica was made with LoRA off; turn LoRA "
            "on there, or send merged weights"
        )
    if needs_base and not manifest.sends_base:
        raise ManifestError(
            f"base first: the sender sends {len(manifest.sent())} tensors and none of the base, but the replica holds "
            "no committed base; send the base with a replica's first sync, also after its restart"
        )


def _described(spec: TensorSpec) -> str:
    return f"{spec.role} {spec.dtype}{list(spec.shape)}"
