"""Test environment (one thread per process, no network) and common fixtures: a device, inputs, whole runs."""

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

# SGLang without a GPU: patch before anything imports torchvision, here and in child processes
if importlib.util.find_spec("sglang") and not importlib.util.find_spec("sgl_kernel"):
    import tests.support.sglang_cpu.sitecustomize

    site = os.path.dirname(tests.support.sglang_cpu.sitecustomize.__file__)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))

# Megatron's tests import its packages at the top, so without them collection itself would fail.
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_megatron_*.py"]


def pytest_collection_modifyitems(items):
    """Files with whole runs, which take minutes, come first: at the end one worker would wait for the other."""
    runs = {item.module for item in items if "ray_dir" in item.fixturenames or hasattr(item.module, "FaultyRun")}
    items.sort(key=lambda item: item.module not in runs)


@pytest.fixture(scope="session")
def device():
    """Device of the tests marked ``gpu``. ``ASYNCRL_TEST_DEVICE=cpu pytest -m gpu tests/test_trainer_gpu.py`` runs the
    same tests without a GPU, to check the tests themselves."""
    import torch

    name = os.environ.get("ASYNCRL_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return name


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with the inputs of a tiny run."""
    from tests.support.tiny import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a small random model, for trainer ranks."""
    from tests.support.trainer import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start_rank():
    """``start_rank(config)`` starts a trainer rank, see `tests.support.trainer.started_ranks`."""
    from tests.support.trainer import started_ranks

    yield from started_ranks()


@pytest.fixture
def start(request, inputs, tmp_path):
    """``start(*more)`` starts or resumes a whole run with the module's ``OPTIONS`` and ``more``."""
    from tests.support.faults import starting

    with starting(inputs, tmp_path / "run", *request.module.OPTIONS) as begin:
        yield begin
