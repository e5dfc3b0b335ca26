"""Names of checkpoint tensors that SGLang fuses into one parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

#: parameter → module names of its parts, in memory order; a model may lack some of them
_PLACED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Loaders fuse these themselves. Most of them silently drop a part that arrives in a call without the others. For
#: latent attention (with a gate in dots3), its indexer, and DeepSeek-V4's attention.
_JOINED = {
    "fused_qkv_a_g_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
    "wqkv_a": ("wq_a", "wkv"),
    "compressor.wkv_gate": ("compressor.wkv", "compressor.wgate"),
}
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.")
#: models whose loaders also fuse `_PLACED`: the vision tower of MiniMax, the decoder of Sarashina2-Vision
_JOINED_BELOW = ("vision_tower.", "llm.")


def fused(name: str, sent: Collection[str]) -> tuple[str, ...]:
    """The sent tensors that SGLang may fuse with ``name``, itself included, in memory order."""
    return _group(name, sent, _PLACED | _JOINED)


def loaded_together(name: str, sent: Collection[str]) -> tuple[str, ...]:
    """The sent tensors that SGLang must get in one call with ``name``, itself included."""
    return _group(name, sent, _PLACED | _JOINED if name.startswith(_JOINED_BELOW) else _JOINED)


def live_names(name: str) -> set[str]:
    """Possible names of the live parameter that holds a tensor."""
    names = {name, _ONE_EXPERT.sub(lambda m: f".experts.w{'2' if m[1] == 'down_proj' else '13'}_", name)}
    for owner, parts in (_PLACED | _JOINED).items():
        names |= {name.replace(f".{part}.", f".{owner}.") for part in parts}
    return names


def _group(name: str, sent: Collection[str], groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    for parts in groups.values():
        for part in parts:
            if f".{part}." in name:
                others = (name.replace(f".{part}.", f".{other}.") for other in parts)
                if len(found := tuple(other for other in others if other in sent)) > 1:
                    return found
    return (name,)
