"""LoRA adapters in SGLang's server: loaded from tensors, one for each version in use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from asyncrl.param_sync.digest import dtype_name, flat_bytes
from asyncrl.param_sync.manifest import AdapterSpec, TensorSpec
from asyncrl.rollouter.engines.sglang.client import Client
from asyncrl.rollouter.engines.sglang.delivery import ALIGN_BYTES, SharedParcel


def adapter_name(adapter: AdapterSpec, slot: int) -> str:
    """The adapter's name in the server, unique per slot."""
    return f"{adapter.name}-{slot}"


async def load_adapter(
    client: Client, adapter: AdapterSpec, slot: int, tensors: Mapping[str, torch.Tensor], workers: int
) -> None:
    """Load a whole adapter into the server, from host memory that it keeps using. Every worker compares the tensors'
    SHA-256 with ours. Raises EngineError."""
    parcel = SharedParcel("cpu", sum(tensor.nbytes + ALIGN_BYTES for tensor in tensors.values()))
    for name, tensor in tensors.items():
        parcel.add((TensorSpec(name, dtype_name(tensor), tuple(tensor.shape)), tensor))
    await client.post(
        "/load_lora_adapter_from_tensors",
        lora_name=adapter_name(adapter, slot),
        config_dict={
            "peft_type": "LORA",
            "r": adapter.r,
            "lora_alpha": adapter.alpha,
            "target_modules": sorted({target.rpartition(".")[2] for target in adapter.target_modules}),
        },
        serialized_named_tensors=parcel.payload(workers),
        load_format="flattened_bucket",
        expected_checksums={name: _sha256(tensor) for name, tensor in tensors.items()},
    )


async def unload_adapter(client: Client, adapter: AdapterSpec, slot: int) -> None:
    """Unload an adapter, which must have no requests: SGLang would wait for them to end."""
    await client.post("/unload_lora_adapter", lora_name=adapter_name(adapter, slot))


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(flat_bytes(tensor.contiguous()).numpy().data)).hexdigest()
