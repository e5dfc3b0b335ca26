"""Live weights of the native engine: overwritten in place, or merged with LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from asyncrl.config.schema import LoraConfig
from asyncrl.models.checkpoint import is_draft
from asyncrl.models.lora import linear_shapes
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.lora.adapted_weights import AdaptedWeights, AdapterState
from asyncrl.param_sync.lora.adapters import adapter_shapes, adapter_spec
from asyncrl.param_sync.lora.merge import merge
from asyncrl.param_sync.manifest import ROLES, Role
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.types.versions import PolicyVersion

OnCommit = Callable[[PolicyVersion], None]


class NativeWeights(LiveWeights):
    """Writes into the model's named views, of target and draft."""

    def __init__(self, model: NativeModel, on_commit: OnCommit) -> None:
        views = model.named_views()
        super().__init__(views, model.tied(), on_commit)
        self._held = {role: _of_role(views, role) for role in ROLES}

    def held(self, role: Role) -> Mapping[str, Tensor]:
        """Tensors that the digest of a role covers."""
        return self._held[role]


class NativeAdaptedWeights(AdaptedWeights):
    """Merges each adapter into the live weights at its commit, from a copy of the base.

    The engine runs the same kernels at the same speed as without LoRA, at the cost of a second copy of the targeted
    weights and a merge per version. ``model`` must hold the base."""

    def __init__(self, model: NativeModel, lora: LoraConfig, on_commit: OnCommit) -> None:
        shapes = linear_shapes(model.config)
        spec = adapter_spec(lora, shapes, str(model.dtype).removeprefix("torch."))
        self._shapes = {module: shape for module, shape in shapes.items() if spec.targets(module)}
        views = model.named_views()
        self._merged = {module: views[f"{module}.weight"] for module in self._shapes}
        copies = {f"{module}.weight": view.clone() for module, view in self._merged.items()}
        self._frozen, self._drafting = _of_role(views, "target") | copies, _of_role(views, "draft")
        ignore = lambda version: None
        draft = LiveWeights(self._drafting, {}, ignore) if self._drafting else None
        super().__init__(LiveWeights(self._frozen, model.tied(), ignore), draft, shapes, self._merge, on_commit)

    def held(self, role: Role) -> Mapping[str, Tensor]:
        """Tensors that the digest of a role covers: those that the session sent."""
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
