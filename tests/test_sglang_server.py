"""SGLang's server process: start, end and identity, with a stand-in for SGLang."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from asyncrl.rollouter.engines.base import EngineError
from asyncrl.rollouter.engines.sglang import server as server_module
from asyncrl.rollouter.engines.sglang.server import Server
from asyncrl.rollouter.engines.sglang.stores import listen_only_at_their_address

SERVER_WITH_A_CHILD = """
import multiprocessing, time

def run_server(arguments):
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def write_sglang(folder, launch_server):
    """Write a package ``sglang`` with the modules that our server process imports."""
    modules = {
        "launch_server": launch_server,
        "srt/plugins/__init__": "def load_plugins(): pass",
        "srt/plugins/hook_registry": """
import functools, types
from sglang.srt.managers.schedule_batch import Req

class HookRegistry:
    def register(target, hook, kind):
        setattr(Req, target.rpartition(".")[2], functools.wraps(Req.check)(lambda *args: hook(Req.check, *args)))

HookType = types.SimpleNamespace(AROUND="around")
""",
        "srt/managers/schedule_batch": "class Req:\n    def check(self, tokens): ...\n",
        "srt/server_args": "def prepare_server_args(words): return words",
    }
    for name, text in modules.items():
        path = folder / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("later_s", [0.0, 3.0], ids=["at-once", "later"])
def test_a_server_s_children_end_with_it_however_early_it_is_killed(tmp_path, later_s):
    """SGLang's own children watch their parent only after their imports; these never do."""
    write_sglang(tmp_path, SERVER_WITH_A_CHILD)
    server = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.rollouter.engines.sglang.serve", str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a replica does
    )
    with server:
        print("[]", file=server.stdin, flush=True)
        server.stdin.close()
        child = psutil.Process(int(server.stdout.readline()))
        time.sleep(later_s)
        server.kill()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    left = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    if left:
        child.kill()
    assert not left


async def test_a_server_that_does_not_start_is_reported_with_its_last_line(capfd):
    """Its whole output is reported as it arrives."""
    no_python = {"PYTHONHOME": "/nowhere"}
    with pytest.raises(EngineError) as raised:
        await Server.start({"device": "cpu"}, no_python, {})
    last_line = capfd.readouterr().err.rstrip().splitlines()[-1]
    assert str(raised.value) == (
        f"SGLang's server process is gone (exit status 1) before it was ready; its last line: {last_line} "
        "(without a GPU it needs stand-ins: see configs/sglang_cpu.yaml)"
    )


async def test_temporary_files_of_a_server_end_with_it(tmp_path, monkeypatch):
    """SGLang names the sockets between its processes as temporary files, and leaves them when it is killed."""
    leave_one = """
import sys, tempfile

def run_server(arguments):
    print(tempfile.NamedTemporaryFile(delete=False).name, flush=True)
    sys.exit(3)
"""
    write_sglang(tmp_path, leave_one)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match="its last line: /") as raised:
        await Server.start({"device": "cuda"}, {}, {})
    left = Path(str(raised.value).rpartition(" ")[2])
    assert left.parent.name.startswith("asyncrl-engine-")
    assert not left.parent.exists()


def test_a_store_listens_only_at_the_address_of_its_group(monkeypatch):
    patched = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(patched, "TCPStore", dist.TCPStore)  # restored after the test
    listen_only_at_their_address()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1))
    again, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1))
    store.set("key", "value")
    assert again.get("key") == b"value"
    sockets = psutil.Process().net_connections("tcp")
    assert {c.laddr.ip for c in sockets if c.laddr.port == port and c.status == "LISTEN"} == {"127.0.0.1"}


async def test_the_key_is_not_sent_to_another_process_that_took_the_port(tmp_path, monkeypatch):
    write_sglang(tmp_path, "import sys, time\ndef run_server(arguments): time.sleep(2); sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    received = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        monkeypatch.setattr(server_module, "_free_port", lambda: stranger.getsockname()[1])
        listening = threading.Thread(target=lambda: received.append(stranger.accept()[0].recv(4096)), daemon=True)
        listening.start()
        with pytest.raises(EngineError, match="before it was ready"):
            async with asyncio.timeout(60):
                await Server.start({"device": "cuda"}, {}, {})
        assert received == []
        with socket.create_connection(stranger.getsockname()) as last:
            last.send(b"over")
        listening.join(10)
    assert received == [b"over"]


PRINTS_ITS_ARGUMENTS = """
import sys

def run_server(arguments):
    print("server_args=", arguments)
    print(" ".join(arguments) * 5000, flush=True)  # so long that it is read in parts
    sys.exit("unrecognized arguments: " + " ".join(arguments))
"""


async def test_neither_its_key_nor_a_secret_argument_is_relayed_or_reported(tmp_path, monkeypatch, capfd):
    write_sglang(tmp_path, PRINTS_ITS_ARGUMENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(server_module.secrets, "token_hex", lambda size: "the-key" * size)
    with pytest.raises(EngineError) as raised:
        await Server.start({"device": "cuda", "hf_tokn": "s3cret" * 8}, {}, {"s3cret" * 8: "${secret:HF}"})
    for shown in (str(raised.value), capfd.readouterr().err.rstrip()):
        assert "unrecognized arguments: --device=cuda --hf-tokn=${secret:HF} " in shown
        assert shown.endswith("--api-key=(the server's key)")
        assert "s3cret" not in shown
        assert "the-key" not in shown
