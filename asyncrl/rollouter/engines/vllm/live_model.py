"""Loads new weights, whole tensors by their canonical names, into a live vLLM model through its layerwise reload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.cpu.vllm import repack_experts
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fingerprints import FingerprintCheck, Verdict
from asyncrl.param_sync.manifest import Manifest, Role, TensorSpec
from asyncrl.param_sync.names import unwrap
from asyncrl.rollouter.engines.vllm.live_names import resolver, ties


class LiveModel:
    """One vLLM model, target or draft. vLLM's loader packs, shards and quantises as it does from a checkpoint. ::

        model = LiveModel("target", net, model_config)
        model.plan(manifest)  # before anything is paused
        model.start()
        model.load((load_as, tensor) for load_as in model.loads[name] ...)
        model.finish()
        model.verdict(fingerprints)  # of what was sent

    From ``start`` to ``finish``, vLLM's current config must be set. ``shared_with``: the target of a draft.
    """

    def __init__(
        self,
        role: Role,
        net: torch.nn.Module,
        config: Any,
        shared_with: torch.nn.Module | None = None,
    ) -> None:
        repack_experts(net)
        self.role, self.net, self._config = role, net, config
        self._resolver = resolver(net, config.dtype, shared_with)
        self.wants = self._resolver.wants
        self._aliases: dict[str, list[str]] = {}
        for alias, owner in ties(net).items():
            self._aliases.setdefault(owner, []).append(alias)
        #: sent tensor → its names for vLLM's loader
        self.loads: dict[str, tuple[str, ...]] = {}
        self._filled: frozenset[str] = frozenset()
        self._feeds: dict[str, list[str]] = {}  # live parameter → sent tensors loaded into it
        self._check = FingerprintCheck()
        self.reloading = False

    def plan(self, specs: Iterable[TensorSpec]) -> None:
        """Plan which parameter each tensor is loaded into. Raises ManifestError unless these are exactly the tensors
        that the model needs."""
        plan = self._resolver.resolve(specs)
        self.loads = plan.loads()
        owners = {t.owner: t for t in plan.tensors if t.load_as is not None and t.owner is not None}
        for owner, aliases in self._aliases.items():
            if owner in owners:
                t = owners[owner]
                self.loads[t.source] += tuple(alias for alias in aliases if alias != t.load_as)
        self._filled = frozenset(map(unwrap, owners))
        self._feeds = {owner: [] for owner in owners}
        for t in plan.tensors:
            if t.load_as is not None and t.owner is not None:
                self._feeds[t.owner].append(t.source)

    def leave_as_it_is(self) -> None:
        """Plan a session without tensors for this model."""
        self.loads, self._feeds = {}, {}

    def start(self) -> None:
        initialize_layerwise_reload(self.net)
        self.reloading = True

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Raises SyncError if vLLM's loader left tensors unread, or a planned parameter out of those it reports as
        filled."""
        filled = self.net.load_weights(tensors)  # type: ignore[operator]
        passed_over = [name for name, _ in tensors]
        if filled is not None:
            passed_over += sorted(self._filled - set(map(unwrap, filled)))
        if passed_over:
            some = ", ".join(passed_over[:4]) + (" …" if len(passed_over) > 4 else "")
            raise SyncError("transfer", None, None, None, f"vLLM's loader passed over {some} of the {self.role}")

    def finish(self) -> None:
        """End the reload, also after a failed update: the weights then match no version, but the model can be updated
        again."""
        self.reloading = False
        finalize_layerwise_reload(self.net, self._config)

    def verdict(self, sent: Mapping[str, torch.Tensor]) -> Verdict:
        """Compare the live parameters with the fingerprints of the tensors sent."""
        return self._check.verdict(self._feeds, sent, dict(self.net.named_parameters(remove_duplicate=False)))


def plan_loads(manifest: Manifest, target: LiveModel, draft: LiveModel | None, staged: bool = False) -> list[str]:
    """Plan the loads of the target, and of the draft if there is one. Next to an adapter the manifest may omit the base
    and a frozen draft. Raises ManifestError.

    ``staged``: the target is one of several pipeline stages. Returns the names of tensors that belong to other stages.
    """
    of_target = [spec for spec in manifest if spec.role == "target"]
    elsewhere = [spec.name for spec in of_target if staged and not target.wants(spec.name)]
    skipped = set(elsewhere)
    adapter_alone = manifest.adapter is not None and not manifest.sends_base
    if adapter_alone:
        target.leave_as_it_is()
    else:
        target.plan(spec for spec in of_target if spec.name not in skipped)
    if draft is not None and adapter_alone and manifest.frozen_draft:
        draft.leave_as_it_is()
    elif draft is not None:
        # a draft that does not share the target's embedding or head needs a copy of them
        draft.plan(spec for spec in manifest if spec.role == "draft" or draft.wants(spec.name))
    return elsewhere
