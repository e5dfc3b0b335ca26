"""Choice of a transport: by fit, by name, by import path."""

import re

import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.param_sync.transports.choose import TransportError, choose, make_reader, make_writer, problems
from asyncrl.param_sync.transports.placement import DevicePlacement

CPU = [DevicePlacement("a")]
GPUS = [DevicePlacement("a", f"a/{i}") for i in range(8)]
NEITHER = "their GPUs are neither one shared GPU nor one GPU each"
MIXED = "all on one machine; " + NEITHER


@pytest.mark.parametrize(
    ("senders", "replicas", "transport", "why"),
    [
        (CPU, CPU * 2, "shared_memory", "all on one machine"),
        (CPU, [DevicePlacement("a"), DevicePlacement("b")], "gloo", "2 machines, over the network"),
        (GPUS[:4], GPUS[4:], "nccl", "4 + 4 separate GPUs"),
        (GPUS[:4], [DevicePlacement("b", "b/0")], "nccl", "4 + 1 separate GPUs"),
        (GPUS[:1], GPUS[:1] * 3, "cuda_ipc", "all on GPU a/0"),
        (GPUS[:1] * 2, GPUS[:1], "cuda_ipc", "all on GPU a/0"),
        (GPUS[:2], GPUS[:1], "shared_memory", MIXED),  # two of three share one
        (GPUS[:2], GPUS[1:3], "shared_memory", MIXED),
        (GPUS[:1], CPU, "shared_memory", MIXED),
        (GPUS[:1], [*GPUS[:1], DevicePlacement("b", "b/0")], "gloo", "2 machines, over the network; " + NEITHER),
        (GPUS[:1], [DevicePlacement("b")], "gloo", "2 machines, over the network; " + NEITHER),
    ],
)
def test_auto_chooses_the_fastest_transport_that_fits_and_gives_the_reason(senders, replicas, transport, why):
    assert choose("auto", senders, replicas) == (transport, why)


def test_a_named_transport_is_used_if_it_fits():
    assert choose("gloo", CPU, CPU).transport == "gloo"
    with pytest.raises(TransportError, match=r"nccl needs .* on its own GPU; found senders a \(CPU\)"):
        choose("nccl", CPU, CPU)
    with pytest.raises(TransportError, match=r"cuda_ipc needs .* the same GPU; .* Transports that fit: nccl \(1 \+ 1 "):
        choose("cuda_ipc", GPUS[:1], GPUS[1:2])
    with pytest.raises(TransportError, match=r"Transports that fit: gloo \(2 machines"):
        choose("shared_memory", CPU, [DevicePlacement("b")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_ipc_without_a_device_is_refused():
    for make in (lambda: make_writer("cuda_ipc", 0, 4096, "127.0.0.1"), lambda: make_reader("cuda_ipc", "replica/0")):
        with pytest.raises(ValueError, match=r"expected a CUDA device .* set param_sync.transport=auto"):
            make()


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_both_ends_are_made(transport):
    writer, reader = make_writer(transport, 3, 4096, "127.0.0.1"), make_reader(transport, "replica/0")
    reader.connect("s", [writer.address], 5)
    writer.open("s", ["replica/0"], 5, 5)
    writer.abort("s")
    reader.close()
    writer.close()


def test_auto_fails_if_no_transport_fits(monkeypatch):
    monkeypatch.setattr("asyncrl.param_sync.transports.choose._automatic", list)
    message = r"auto finds no transport; found senders a \(CPU\) .* Transports that fit: none"
    with pytest.raises(TransportError, match=message):
        choose("auto", CPU, CPU)


def test_a_package_whose_transport_does_not_import_stops_only_those_runs_that_may_take_it(tmp_path, monkeypatch):
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[asyncrl.transports]\nbroken = no_such_module:TRANSPORT\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config()
    assert config.param_sync.transport == "auto"
    (problem,) = problems(config)
    assert problem.startswith("param_sync.transport: no_such_module:TRANSPORT: module no_such_module does not import")
    config.param_sync.transport = "gloo"
    assert list(problems(config)) == []
    assert choose("gloo", CPU, CPU).transport == "gloo"


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        (
            "tcp",
            r"param_sync\.transport: expected auto, one of cuda_ipc, .*, or an import path such as .*; found 'tcp'",
        ),
        ("no_such_module:TRANSPORT", r"param_sync\.transport: .* module no_such_module does not import .*"),
        ("math:pi", r"param_sync\.transport: math:pi lacks across_machines, .*, writer, which every transport has"),
    ],
)
def test_an_unknown_transport_is_refused_before_anything_starts(transport, message):
    config = Config()
    config.param_sync.transport = transport
    (problem,) = problems(config)
    assert re.fullmatch(message, problem)


def test_a_transport_between_gpus_is_refused_on_the_cpu():
    config = Config()
    config.param_sync.transport, config.trainer.device = "nccl", "cpu"
    (problem,) = problems(config)
    assert problem == "param_sync.transport: nccl joins GPUs; expected trainer.device cuda or auto, found cpu"
