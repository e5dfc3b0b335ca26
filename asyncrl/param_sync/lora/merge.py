"""Merge of LoRA adapters into full weights before they are sent, for engines without LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.lora.adapters import check_adapter, module_of, target_pairs
from asyncrl.param_sync.manifest import Manifest, ManifestError, is_adapter


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, r: int) -> torch.Tensor:
    """``weight + alpha / r · B @ A`` for weight [out, in], A [r, in], B [out, r]: a new tensor in the weight's dtype,
    computed in float32."""
    merged = weight.detach().to(torch.float32, copy=True)
    return merged.addmm_(b.detach().float(), a.detach().float(), alpha=alpha / r).to(weight.dtype)


class MergingExport:
    """Turns a backend's export of base and adapter into one of full weights.

    ``manifest`` describes base and adapter; plan sessions with ``merged``. The three tensors of a target module, its
    weight and its pair, must come from one sender and one module at a time, in any order within a module and with other
    tensors between them, so that only one module is held beside the backend's own tensors. They must keep their values
    until the module is complete. ::

        merging = MergingExport(backend.manifest())
        sender.send(merging(backend.export()))

    Raises ManifestError for an incomplete adapter, and for one that targets a weight whose storage another tensor
    shares.
    """

    def __init__(self, manifest: Manifest) -> None:
        # not all whose names end like a target: experts and vision towers have no pairs
        adapted = {module_of(t.name) for t in manifest.sent() if is_adapter(t.name)}
        modules = {
            module: (t.shape[0], t.shape[1])
            for t in manifest.sent()
            if (module := t.name.removesuffix(".weight")) in adapted and t.role == "target" and len(t.shape) == 2
        }
        check_adapter(manifest, modules, "the base")
        assert manifest.adapter is not None
        self._spec = manifest.adapter
        self._modules: dict[str, _Module] = {}
        for module, (a, b) in target_pairs(manifest, modules).items():
            names = _Module(f"{module}.weight", a, b)
            self._modules |= dict.fromkeys(names, names)
        for t in manifest:
            if t.tied_to in self._modules:
                raise ManifestError(
                    f"adapter {self._spec.name} targets {t.tied_to}, whose storage {t.name} shares: merged it would "
                    "change both; leave it out of the target modules or untie them"
                )
        self.merged = Manifest(tuple(t for t in manifest if not is_adapter(t.name)))

    def __call__(self, export: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Always runs ``export`` to its end: other ranks may wait in its collectives. Raises SyncError if the tensors
        of a module do not come together."""
        held: dict[str, torch.Tensor] = {}
        export = iter(export)
        try:
            for name, tensor in export:
                module = self._modules.get(name)
                if module is None:
                    yield name, tensor
                    continue
                if name in held or held.keys() - set(module):
                    raise _apart(f"export gave {name}", held)
                held[name] = tensor.detach()
                if len(held) == len(module):
                    yield module.weight, self._merge(module, held)
            if held:
                raise _apart("export ended", held)
        finally:
            for _ in export:
                pass

    def _merge(self, module: _Module, held: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, a, b = (held.pop(name) for name in module)
        if module.a.endswith("lora_embedding_A"):  # an embedding's weight is [in, out]
            a, b = b.t(), a.t()
        return merge(weight, a, b, self._spec.alpha, self._spec.r)


class _Module(NamedTuple):
    """Names of the three tensors of one merged weight."""

    weight: str
    a: str
    b: str


def _apart(event: str, held: Mapping[str, torch.Tensor]) -> SyncError:
    message = (
        f"{event} while {', '.join(held)} waits for the rest of its module; weight, A and B of one must come together"
    )
    return SyncError("transfer", None, None, None, message)
