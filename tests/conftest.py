"""One thread per process, no network, whatever the machine; and what many tests want: a device, inputs, whole runs."""

import importlib.util
import os

import pytest

for key, value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(key, value)

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    hypothesis.settings.register_profile("shared machine", deadline=None)  # an example may wait for a core
    hypothesis.settings.load_profile("shared machine")

pytest.register_assert_rewrite("tests.support.engine_contract", "tests.support.lora_contract")

# SGLang without a GPU: before anything imports torchvision, here and in the processes to come
if importlib.util.find_spec("sglang") and not importlib.util.find_spec("sgl_kernel"):
    import tests.support.sglang_cpu.sitecustomize

    site = os.path.dirname(tests.support.sglang_cpu.sitecustomize.__file__)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))

# tests of a backend whose packages are not in this environment cannot even be imported
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_megatron_*.py"]


@pytest.fixture(scope="session")
def device():
    """Where tests marked ``gpu`` compute. ``ASYNCRL_TEST_DEVICE=cpu pytest -m gpu tests/test_trainer_gpu.py`` runs the
    very same tests without a GPU, to prove the tests themselves."""
    import torch

    name = os.environ.get("ASYNCRL_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return name


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The folder with the inputs of a tiny run."""
    from tests.support.tiny import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def start(request, inputs, tmp_path):
    """``start(*more)`` starts a whole run, or goes on with it, with the module's ``OPTIONS`` and more."""
    from tests.support.faults import starting

    with starting(inputs, tmp_path / "run", *request.module.OPTIONS) as begin:
        yield begin
