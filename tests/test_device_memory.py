"""The line that says what holds a GPU's memory when it runs out."""

import pytest
import torch

from asyncrl.processes.device_errors import is_device_error
from asyncrl.processes.device_memory import GIB, DeviceMemoryError, line, naming_memory, tensor_bytes

CPU = torch.device("cpu")


def test_the_line_divides_the_device_among_its_holders():
    held = {"weights": 3 * GIB, "KV cache": 10 * GIB, "draft": 0}
    found = line("cuda:0", "while it generated", held, "rollout.engine.slots", 15 * GIB, 16 * GIB, GIB, 80 * GIB)
    assert found == (
        "cuda:0 ran out of memory while it generated. Of its 80.00 GiB: weights 3.00, KV cache 10.00, activations and "
        "workspace 2.00, cached by torch 1.00, other processes and CUDA itself 63.00, free 1.00. Lower "
        "rollout.engine.slots"
    )


def test_only_memory_errors_are_renamed_and_they_do_not_cost_the_device():
    training = naming_memory(CPU, "in a train step", lambda: {"weights": GIB}, "this")
    with pytest.raises(DeviceMemoryError, match=r"in a train step.*weights 1\.00.*Lower this") as raised, training:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert not is_device_error(raised.value)
    with pytest.raises(ValueError, match="other"), naming_memory(CPU, "in a train step", dict, "this"):
        raise ValueError("other")


def test_tensors_are_counted_where_they_lie():
    tree = {"a": torch.zeros(3), "b": {"c": torch.zeros(2, dtype=torch.bfloat16)}, "d": 7}
    assert tensor_bytes(tree, CPU) == 16
    assert tensor_bytes(tree, torch.device("cuda", 0)) == 0
