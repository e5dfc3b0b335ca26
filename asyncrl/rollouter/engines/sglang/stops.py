"""Patch of SGLang's processes: a request stops at its own stop tokens only.

SGLang also stops at every EOS token of config.json, generation_config.json and the tokenizer, where other engines would
continue. Its ``ignore_eos`` is no help: it also ignores the request's own stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CHECK = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"


def stop_at_own_tokens() -> None:
    """Register the patch. Call in each of SGLang's processes before it loads its plugins, which applies it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CHECK, _without_the_models_own, HookType.AROUND)


def applied() -> bool:
    """True if the patch took effect: SGLang ignores a hook that it cannot apply."""
    from sglang.srt.managers.schedule_batch import Req

    return hasattr(getattr(Req, _CHECK.rpartition(".")[2], None), "__wrapped__")


def _without_the_models_own(check: Callable[..., bool], req: Any, *args: Any, **options: Any) -> bool:
    theirs = req.eos_token_ids, req.tokenizer
    req.eos_token_ids = req.tokenizer = None
    try:
        return check(req, *args, **options)
    finally:
        req.eos_token_ids, req.tokenizer = theirs
