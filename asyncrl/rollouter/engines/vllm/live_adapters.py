"""The LoRA adapters of a live vLLM model, one per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper

from asyncrl.param_sync.manifest import AdapterSpec


class LiveAdapters:
    """Keeps each slot's adapter, because vLLM's ``manager`` (one per worker) drops all of them on a base update."""

    def __init__(self, manager: LoRAModelManager) -> None:
        self._manager = manager
        self._held: dict[int, LoRAModel] = {}  # by slot

    def adopt(
        self, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor], slot: int, keep: Sequence[int]
    ) -> list[str]:
        """Put an adapter into ``slot`` and empty all other slots except those in ``keep``. Returns the modules that the
        adapter has weights for but that this worker does not adapt: vLLM ignores those weights."""
        mapper: Any = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            slot,
            dict(tensors),
            PEFTHelper(r=spec.r, lora_alpha=spec.alpha, target_modules=list(spec.target_modules)),  # type: ignore[arg-type]
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        self._held = {s: kept for s, kept in self._held.items() if s in keep} | {slot: lora}
        for held, model in self._manager.list_adapters().items():
            if model is not self._held.get(held):
                self._manager.remove_adapter(held)
        for kept in self._held.values():
            self._manager.add_adapter(kept)
            self._manager.activate_adapter(kept.id)
        # add_adapter has merged the adapters of packed modules
        return sorted(lora.loras.keys() - self._manager.modules.keys())
