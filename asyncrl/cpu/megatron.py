"""Patches that let megatron-core and megatron-bridge run without CUDA, each with a name and a reason.

No effect on a machine with CUDA. `activate` must be called before `megatron.bridge` is imported; the modules of
`asyncrl.trainer.backends.megatron` do so through `packages.prepare`. Whatever an option can do, such as unfused
kernels, is set where the model is built.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version

_ABSENT = object()


@dataclass
class Patch:
    """One patch. ``replace`` returns (owner, attribute, function from the old value to the new) for each attribute that
    it replaces. ``replaced`` keeps the old values, so that a test can show the failure without it. ``wanted``: whether
    the installed releases need it."""

    name: str
    why: str
    replace: Callable[[], list[tuple[Any, str, Callable[[Any], Any]]]]
    wanted: Callable[[], bool] = lambda: True
    replaced: list[tuple[Any, str, Any]] = field(default_factory=list)

    def apply(self) -> None:
        for owner, attribute, new in self.replace():
            old = vars(owner).get(attribute, _ABSENT)
            self.replaced.append((owner, attribute, old))
            setattr(owner, attribute, new(old))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Undo this patch inside the context."""
        applied = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in self.replaced]
        for owner, attribute, old in self.replaced:
            delattr(owner, attribute) if old is _ABSENT else setattr(owner, attribute, old)
        try:
            yield
        finally:
            for owner, attribute, new in applied:
                setattr(owner, attribute, new)


def needed() -> bool:
    return not torch.cuda.is_available()


def activate() -> None:
    """Apply the patches that the installed releases need, once. No effect on a machine with CUDA."""
    if needed() and not any(patch.replaced for patch in PATCHES):
        _import_bridge_without_its_kernels()
        for patch in PATCHES:
            if patch.wanted():
                patch.apply()


def patch_named(name: str) -> Patch:
    return next(patch for patch in PATCHES if patch.name == name)


# -- torch ---------------------------------------------------------------------------------------------------------


def _current_device() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    return [(torch.cuda, "current_device", lambda _: lambda: torch.device("cpu"))]


def _moves() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    stay = lambda _: lambda self, *args, **kwargs: self
    return [(torch.Tensor, "cuda", stay), (torch.nn.Module, "cuda", stay)]


def _synchronize() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    return [(torch.cuda, "synchronize", lambda _: lambda device=None: None)]


class _NoStream:
    """Stand-in for the current CUDA stream. It never has an event to wait for."""

    def wait_event(self, event: Any) -> None: ...


def _gradients_stream() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    return [(torch.cuda, "current_stream", lambda _: lambda device=None: _NoStream())]


def _random_state() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    get, put = torch.get_rng_state, torch.set_rng_state

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)

    return [
        (torch.cuda, "get_rng_state", lambda _: lambda device=None: get()),
        (torch.cuda, "set_rng_state", lambda _: lambda state, device=None: put(state)),
        (torch.cuda, "manual_seed", lambda _: seed),
        (random, "_get_cuda_rng_state", lambda _: lambda device="cuda", clone=False, graph_safe=False: get()),
        (random, "_set_cuda_rng_state", lambda _: lambda state, device=-1, graph_safe=False: put(state)),
    ]


# -- megatron-core -------------------------------------------------------------------------------------------------


class _HostTorch(types.ModuleType):
    """torch with ``device="cuda"`` meaning the CPU. Replaces ``torch`` in modules that hard-code that device."""

    FACTORIES = ("empty", "ones", "tensor", "zeros")

    def __init__(self) -> None:
        super().__init__("torch")
        for name in self.FACTORIES:
            setattr(self, name, self._on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make


#: modules that hard-code ``device="cuda"`` in a training step
_CUDA_IN_SOURCE = ("megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer.optimizer")


def _device_in_source() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    host = _HostTorch()
    return [(importlib.import_module(name), "torch", lambda _: host) for name in _CUDA_IN_SOURCE]


def _tensor_types() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer")

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def patched(self: Any, *args: Any, **kwargs: Any) -> None:
            plain = torch.Tensor.type

            def named_as_on_cuda(tensor: torch.Tensor, *to: Any, **how: Any) -> Any:
                found = plain(tensor, *to, **how)
                return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

            torch.Tensor.type = named_as_on_cuda  # type: ignore[method-assign, assignment]
            try:
                init(self, *args, **kwargs)
            finally:
                torch.Tensor.type = plain  # type: ignore[method-assign]

        return patched

    return [(optimizer.DistributedOptimizer, "__init__", wrap)]


def _router_kernel() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    return [(importlib.import_module("megatron.core.transformer.moe.moe_utils"), "te_general_gemm", lambda _: None)]


def _token_dispatcher() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    module = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def counts_on_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits"):
                if (counts := getattr(self, name)) is not None:
                    setattr(self, name, counts.tolist())
        return tokens_per_expert

    return [
        (module.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", lambda _: "none"),
        (module.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", lambda _: counts_on_host),
    ]


# -- megatron-bridge -----------------------------------------------------------------------------------------------


def _scatter() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").MegatronParamMapping

    def wrap(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def patched(self: Any, splits: list[torch.Tensor] | None, *args: Any, **kwargs: Any) -> torch.Tensor:
            return scatter(self, splits and [part.contiguous() for part in splits], *args, **kwargs)

        return patched

    return [(mapping, "scatter_to_tp_ranks", wrap)]


def _experts() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").MegatronParamMapping

    def wrap(gather: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
        def patched(self: Any, weights: torch.Tensor, module: Any, hf_name: str) -> dict[str, torch.Tensor]:
            if ".local_experts." not in self.megatron_param:
                return gather(self, weights, module, hf_name)
            if self.ep_size == 1:
                return {str(hf_name): weights}
            kept, number = self.megatron_param, str(hf_name).partition(".experts.")[2].partition(".")[0]
            self.megatron_param = f"{kept}{number}"
            try:
                return gather(self, weights, module, hf_name)
            finally:
                self.megatron_param = kept

        return patched

    return [(mapping, "gather_from_ep_ranks", wrap)]


PATCHES = (
    Patch(
        "current_device",
        "modules are created on torch.cuda.current_device(), which raises without a driver",
        _current_device,
    ),
    Patch(
        "moves",
        "copies of the embedding and the rope's tables are moved with .cuda() whatever the configuration says",
        _moves,
    ),
    Patch(
        "synchronize",
        "pipeline stages synchronize the device after exchanging shapes; a CPU has nothing to wait for",
        _synchronize,
    ),
    Patch(
        "gradients_stream",
        "before it sums gradients, megatron-core 0.19 gets the current CUDA stream to wait for CUDA graphs, even if "
        "there are none",
        _gradients_stream,
        wanted=lambda: not _is_before("megatron-core", 0, 19),
    ),
    Patch(
        "random_state",
        "the named random states of tensor-parallel regions and recomputed layers use the CUDA generator",
        _random_state,
    ),
    Patch(
        "device_in_source",
        "the schedules' token count and the optimizer's scale are created with device=\"cuda\"",
        _device_in_source,
    ),
    Patch(
        "tensor_types",
        "the distributed optimizer recognizes a parameter's precision by its type's name, torch.cuda.FloatTensor",
        _tensor_types,
    ),
    Patch(
        "router_kernel",
        "without Transformer Engine, moe_utils reads the name te_general_gemm, which it never sets",
        _router_kernel,
        wanted=lambda: _is_before("megatron-core", 0, 17),
    ),
    Patch(
        "token_dispatcher",
        "the all-to-all dispatcher copies the token counts per expert rank to the host on its own CUDA stream; on the "
        "CPU they only have to become plain numbers",
        _token_dispatcher,
    ),
    Patch(
        "scatter",
        "gloo's scatter ignores strides: a shard that is a view across rows silently arrives with other values "
        "(row-parallel weights, o_proj and down_proj, at tensor parallel sizes above 1)",
        _scatter,
        wanted=lambda: _is_before("megatron-bridge", 0, 4),
    ),
    Patch(
        "experts",
        "the bridge reads an expert's number after .weight, where Transformer Engine's grouped experts have it; layers "
        "without Transformer Engine have it before, as local_experts.N: it is taken from the Hugging Face name",
        _experts,
        wanted=lambda: _is_before("megatron-bridge", 0, 4),
    ),
)


def _import_bridge_without_its_kernels() -> None:
    """Import megatron.bridge without transformer-engine and triton. It imports both at module level, for models and
    kernels that no CPU runs. Stand-ins that only define names replace them during the import and are removed
    afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dozen about packages that are not installed
        _import_bridge()


def _import_bridge() -> None:
    # modules that look for either package must be imported before the stand-ins exist
    for name in (
        "megatron.core.extensions.transformer_engine",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.transformer.moe.moe_layer",
        "megatron.core.transformer.multi_token_prediction",
        "megatron.core.optimizer",
        "megatron.core.distributed",
        "megatron.core.fp8_utils",
        "transformers",
    ):
        importlib.import_module(name)
    stand_ins: dict[str, types.ModuleType] = {}
    if importlib.util.find_spec("transformer_engine") is None:
        stand_ins |= _transformer_engine()
    if importlib.util.find_spec("triton") is None:
        stand_ins |= _triton()
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("megatron.bridge")
    finally:
        for name in stand_ins:
            del sys.modules[name]
    if "transformer_engine" in stand_ins:
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.") and getattr(module, "HAVE_TE", False) is True:
                module.HAVE_TE = False  # type: ignore[attr-defined]


def _is_before(package: str, *release: int) -> bool:
    """True if the installed release of ``package`` is older than ``release``."""
    return Version(importlib.metadata.version(package)).release < release


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(names)
    return module


def _transformer_engine() -> dict[str, types.ModuleType]:
    names = ("Linear", "LayerNormLinear", "GroupedLinear", "TransformerLayer")
    layers = {name: type(name, (torch.nn.Module,), {}) for name in names}
    ops = types.SimpleNamespace(Sequential=torch.nn.Sequential)
    torch_part = _module("transformer_engine.pytorch", ops=ops, fp8_autocast=contextlib.nullcontext, **layers)
    top = _module("transformer_engine", __version__="0.0.0", pytorch=torch_part)
    return {"transformer_engine": top, "transformer_engine.pytorch": torch_part}


def _triton() -> dict[str, types.ModuleType]:
    def decorator(*args: Any, **kwargs: Any) -> Any:
        bare = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if bare else lambda function: function

    language = _module("triton.language", constexpr=int)
    language.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    functions = {name: decorator for name in ("jit", "autotune", "heuristics")}
    top = _module(
        "triton",
        __version__="0.0.0",
        language=language,
        Config=lambda *args, **kwargs: None,
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
        **functions,
    )
    return {"triton": top, "triton.language": language}
