"""Weights for the native engine arrive straight in its live parameters, those that adapters change beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from asyncrl.config.schema import LoraConfig
from asyncrl.models.checkpoint import is_draft
from asyncrl.models.lora import linear_shapes
from asyncrl.param_sync.adapter_merge import merge
from asyncrl.param_sync.adapters import AdapterReceiver, AdapterState, adapter_shapes, adapter_spec
from asyncrl.param_sync.live_receiver import LiveViewReceiver
from asyncrl.param_sync.manifest import Role
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.sample import PolicyVersion

OnCommit = Callable[[PolicyVersion], None]


class NativeReceiver(LiveViewReceiver):
    """Writes into the model's named views, target and draft alike, so a committed version is whole by construction."""

    def __init__(self, model: NativeModel, on_commit: OnCommit) -> None:
        super().__init__(model.named_views(), model.tied(), on_commit)
        self._model = model

    def held(self, role: Role) -> Mapping[str, Tensor]:
        """What the digest of a role is taken of."""
        return _of_role(self._model.named_views(), role)


class NativeAdapterReceiver(AdapterReceiver):
    """Merges each adapter into the live weights when it is committed, anew from a base that is kept beside them.

    So the engine computes what it computes without LoRA, in the same kernels and at the same speed; what it costs is a
    second copy of the weights that the adapter targets, and a merge per version. ``model`` holds the base."""

    def __init__(self, model: NativeModel, lora: LoraConfig, on_commit: OnCommit) -> None:
        shapes = linear_shapes(model.config)
        spec = adapter_spec(lora, shapes, str(model.dtype).removeprefix("torch."))
        self._shapes = {module: shape for module, shape in shapes.items() if spec.targets(module)}
        views = model.named_views()
        self._merged = {module: views[f"{module}.weight"] for module in self._shapes}
        copies = {f"{module}.weight": view.clone() for module, view in self._merged.items()}
        self._frozen, self._drafting = _of_role(views, "target") | copies, _of_role(views, "draft")
        ignore = lambda version: None
        draft = LiveViewReceiver(self._drafting, {}, ignore) if self._drafting else None
        super().__init__(LiveViewReceiver(self._frozen, model.tied(), ignore), draft, shapes, self._merge, on_commit)

    def held(self, role: Role) -> Mapping[str, Tensor]:
        """What the digest of a role is taken of: what the session sends."""
        if role == "draft":
            return self._drafting if self.draft_travels else {}
        return {**(self._frozen if self.base_travels else {}), **self.tensors()}

    @torch.no_grad()
    def _merge(self, state: AdapterState, version: PolicyVersion) -> None:
        for module, live in self._merged.items():
            pair = adapter_shapes(module, self._shapes[module], state.spec.r)
            a, b = (state.tensors[name].to(live.device) for name in pair)
            live.copy_(merge(self._frozen[f"{module}.weight"], a, b, state.spec.alpha, state.spec.r))


def _of_role(views: Mapping[str, Tensor], role: Role) -> dict[str, Tensor]:
    return {name: view for name, view in views.items() if is_draft(name) == (role == "draft")}
