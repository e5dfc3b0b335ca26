"""Sandboxes of this machine: what programs in them can do, and what they cannot."""

import asyncio
import contextlib
import glob
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from asyncrl.cli.sandbox import main as serve_or_probe
from asyncrl.config.schema import SandboxConfig
from asyncrl.sandbox import measure, runner
from asyncrl.sandbox.base import Limits, SandboxFailed
from asyncrl.sandbox.cgroups import Cgroups
from asyncrl.sandbox.choose import KINDS, open_pool, probe
from asyncrl.sandbox.client import SandboxClient
from asyncrl.sandbox.host import SandboxHost
from asyncrl.sandbox.interpreter import find_interpreter
from asyncrl.sandbox.pool import SandboxPool
from asyncrl.sandbox.service import SandboxService
from asyncrl.sandbox.users import Users
from tests.support.sandbox_attacks import ATTACKS
from tests.support.sandbox_image import image_for_podman
from tests.support.sandbox_trial import LIMITS, Host, as_somebody, trial

pytestmark = pytest.mark.agents

CONFIG = SandboxConfig(memory_mb=192, processes=24, disk_mb=64, warm=1, concurrent=2)
BWRAP = shutil.which("bwrap")
PODMAN = """#!/bin/sh
cd {folder}
echo "$@" >> log
case $1 in
    ps) for name in asyncrl-*; do [ -e "$name" ] && echo "$name"; done;;
    rm) shift 5; rm -f "$@";;
esac
[ "$1" = run ] || exit 0
while [ "$1" != --name ]; do shift; done
: > "$2"
while [ "$1" != --volume ]; do shift; done
runner=${{2%%:*}}
while [ "$1" != /runner.py ]; do shift; done
shift
exec {bwrap} --dev-bind / / --unshare-user --unshare-pid --as-pid-1 --proc /proc --tmpfs /sandbox --chdir /sandbox \\
    --die-with-parent {python} -I -S $runner "$@"
"""
PYTHON = "/usr/bin/python3"  # this process's own may lie in root's home, which other users may not enter


@pytest.fixture(scope="module")
def image():
    with image_for_podman() as name:
        yield name


@pytest.fixture(params=["bubblewrap", "landlock", "podman"])
def kind(request):
    """Options of each kind."""
    if request.param == "podman":
        return {"kind": "podman", "image": request.getfixturevalue("image")}
    return {"kind": request.param, "python": PYTHON if request.param == "landlock" else ""}


@contextlib.asynccontextmanager
async def sandbox_of(**options):
    async with await open_pool(SandboxConfig(**{"warm": 0, **options})) as pool:
        sandbox = await pool.create()
        yield sandbox
        await sandbox.close()


async def test_a_program_runs_with_input_environment_and_folder(kind):
    async with sandbox_of(**kind) as sandbox:
        script = 'cat; echo $NAME; [ "$(pwd)" = "$HOME" ] && echo home; echo oops >&2; exit 3'
        ran = await sandbox.exec(["sh", "-c", script], stdin="in\n", env={"NAME": "v"})
        assert (ran.code, ran.stdout, ran.stderr, ran.ended) == (3, "in\nv\nhome\n", "oops\n", "exited")
        assert (await sandbox.exec(["nothing-like-it"])).code == 127
        assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).code == 128 + signal.SIGKILL
        assert (await sandbox.exec(["pwd"], cwd="sub")).code == 126


async def test_files_are_written_and_read_until_it_is_closed(kind):
    async with sandbox_of(**kind) as sandbox:
        await sandbox.write("a/b.txt", b"\0one")
        await sandbox.write("a/b.txt", b"two")
        assert await sandbox.read("/sandbox/a/b.txt") == b"two"
        assert (await sandbox.exec(["cat", "a/b.txt"])).stdout == "two"
        for path in ("none.txt", "a", "/usr/none"):
            with pytest.raises(SandboxFailed, match=f": (/sandbox/)?{path}$") as failure:
                await sandbox.read(path)
            assert failure.value.kind == "task"
        with pytest.raises(SandboxFailed, match=r"Read-only|denied"):
            await sandbox.write("/usr/bin/true", b"")


async def test_programs_run_at_once_and_may_leave_others_running(kind):
    async with sandbox_of(**kind) as sandbox:
        began = time.monotonic()
        both = await asyncio.gather(*(sandbox.exec(["sh", "-c", f"sleep 1; echo {n}"]) for n in range(2)))
        assert [ran.stdout for ran in both] == ["0\n", "1\n"]
        assert time.monotonic() - began < 1.9
        await sandbox.exec(["sh", "-c", "(sleep 0.5; echo later > later) > /dev/null 2>&1 &"])
        await asyncio.sleep(1)
        assert await sandbox.read("later") == b"later\n"


async def test_a_program_that_takes_too_long_ends_with_all_that_runs_and_files_stay(kind):
    async with sandbox_of(**kind) as sandbox:
        script = "echo kept > kept; echo said; setsid sh -c 'while true; do echo >> beat; sleep 0.05; done' & sleep 60"
        ran = await sandbox.exec(["sh", "-c", script], timeout_s=1)
        assert (ran.ended, ran.stdout) == ("timeout", "said\n")
        beats = await sandbox.read("beat")
        await asyncio.sleep(1.2)
        assert beats == await sandbox.read("beat") != b""
        assert await sandbox.read("kept") == b"kept\n"
        for _ in range(3):  # nothing that comes later is killed, too
            assert (await sandbox.exec(["sh", "-c", "sleep 0.05; echo on"])).stdout == "on\n"


async def test_output_beyond_the_limit_is_dropped(kind):
    async with sandbox_of(**kind, output_kb=1) as sandbox:
        ran = await sandbox.exec(["python3", "-c", "print('x' * 100_000)"])
        assert (ran.stdout, ran.truncated, ran.code) == ("x" * 1024, True, 0)
        assert not (await sandbox.exec(["echo", "short"])).truncated


def test_output_that_comes_with_the_end_of_a_program_counts_as_lost():
    """All that is kept has been read before."""
    answers, answer = os.pipe()
    served = runner.Runner(-1, answer, lambda: None)
    served.exec(1, ["sh", "-c", "printf 1234; read line; printf 5"], b"go on\n", dict(os.environ), "/", 30.0, 4)
    (program,) = served._programs.values()
    (out,) = (descriptor for descriptor, stream in program.reads.items() if not stream)
    while len(program.output[0]) < 4:
        select.select([out], [], [], 30)
        program.take(out)
    program.feed()
    assert os.waitpid(program.pid, 0)[1] == 0
    served._end(program, 0)
    _, status, code, *_ = runner.REPLY.unpack(os.read(answers, runner.REPLY.size))
    assert (status, code, os.read(answers, 100)) == (runner.EXITED | 4, 0, b"1234")


@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
async def test_half_of_a_surrogate_pair_is_the_caller_s_fault(name):
    async with sandbox_of(kind=name, python=PYTHON) as sandbox:
        half = "\ud83d"
        for argv, options in (
            (["cat"], {"stdin": half}),
            ([half], {}),
            (["echo", half], {}),
            (["env"], {"env": {"NAME": half}}),
            (["pwd"], {"cwd": half}),
        ):
            with pytest.raises(SandboxFailed, match=r"expected text: .*surrogates") as failure:
                await sandbox.exec(argv, **options)
            assert failure.value.kind == "task"
        assert (await sandbox.exec(["echo", "\udcff", "😀"])).stdout == "\ufffd 😀\n"  # bytes of a file's name


def test_a_program_that_cannot_be_started_leaves_no_second_runner():
    """Whatever its caller has let through."""
    answers, answer = os.pipe()
    served = runner.Runner(-1, answer, lambda: None)
    served.exec(1, ["\ud83d"], b"", {"PATH": "/usr/bin"}, "/", 30.0, 1000)
    (program,) = served._programs.values()
    assert os.waitstatus_to_exitcode(os.waitpid(program.pid, 0)[1]) == 126
    served._end(program, 126)
    os.read(answers, runner.REPLY.size)
    assert b"surrogates not allowed" in os.read(answers, 1000)


def test_a_file_counts_once_whatever_names_it_has(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(600 << 10))
    (tmp_path / "folder").mkdir()
    for number in range(5):
        (tmp_path / "folder" / f"{number}").hardlink_to(tmp_path / "file")
    assert measure.folder(str(tmp_path), [], Limits(disk_mb=1)) == ""
    (tmp_path / "other").write_bytes(os.urandom(600 << 10))
    assert measure.folder(str(tmp_path), [], Limits(disk_mb=1)) == "the sandbox had more than its 1 MiB of files"


async def test_a_venv_is_an_interpreter_with_its_packages(tmp_path):
    """Also one that the sandbox's user could not reach by itself."""
    async with sandbox_of(python=sys.executable) as sandbox:
        ran = await sandbox.exec(["python3", "-c", "import aiohttp, sys; print(sys.prefix)"])
        assert (ran.stderr, ran.stdout) == ("", f"{sys.prefix}\n")
    tmp_path.chmod(0o700)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "table").write_text("12")
    async with sandbox_of(paths=[str(tmp_path / "data")]) as sandbox:
        assert await sandbox.read(str(tmp_path / "data" / "table")) == b"12"
        with pytest.raises(SandboxFailed, match=r"Read-only|denied"):
            await sandbox.write(str(tmp_path / "data" / "table"), b"13")
    assert (tmp_path / "data" / "table").read_text() == "12"


async def test_each_use_has_a_sandbox_of_its_own_and_others_wait(kind):
    async with await open_pool(SandboxConfig(**{**vars(CONFIG), **kind})) as pool:
        first, second = await pool.create(), await pool.create()
        await first.write("mine", b"1")
        with pytest.raises(SandboxFailed):
            await second.read("mine")
        waiting = asyncio.create_task(pool.create())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await first.close()
        await first.close()
        third = await waiting
        with pytest.raises(SandboxFailed):
            await third.read("mine")
        with pytest.raises(SandboxFailed, match="closed"):
            await first.exec(["true"])
        for sandbox in (second, third):
            await sandbox.close()
    assert not glob.glob(f"/sys/fs/cgroup/**/asyncrl-{os.getpid()}-*", recursive=True)


async def test_a_close_that_is_cancelled_goes_on():
    async with await open_pool(SandboxConfig(**{**vars(CONFIG), "kind": "bubblewrap", "concurrent": 1})) as pool:
        for _ in range(2):
            sandbox = await pool.create()
            closing = asyncio.create_task(sandbox.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        await asyncio.wait_for(pool.create(), 30)


async def test_a_user_who_goes_away_during_a_call_gives_the_sandbox_back(monkeypatch):
    monkeypatch.setattr("asyncrl.sandbox.host.CUT_S", 0.1)
    async with await open_pool(SandboxConfig(**{**vars(CONFIG), "kind": "bubblewrap", "concurrent": 1})) as pool:
        host = SandboxHost(pool, "token")
        port = await host.start(host="127.0.0.1")
        try:
            gone = SandboxClient(f"http://127.0.0.1:{port}", "token")
            call = asyncio.create_task((await gone.create()).exec(["sleep", "60"], timeout_s=60))
            await asyncio.sleep(0.5)
            call.cancel()
            await gone.close()
            await asyncio.wait_for(pool.create(), 30)
        finally:
            await host.close()


async def test_a_process_that_is_killed_gives_its_sandboxes_back(tmp_path):
    script = f"""
import asyncio
from asyncrl.sandbox.client import SandboxClient

async def main():
    await SandboxClient("unix:{tmp_path}/socket", "token").create()
    print("made", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    async with await open_pool(SandboxConfig(**{**vars(CONFIG), "kind": "bubblewrap", "concurrent": 1})) as pool:
        host = SandboxHost(pool, "token")
        await host.start(socket=f"{tmp_path}/socket")
        try:
            with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
                try:
                    assert await asyncio.to_thread(process.stdout.readline) == b"made\n"
                finally:
                    process.kill()
            await asyncio.wait_for(pool.create(), 30)
        finally:
            await host.close()


async def test_more_memory_than_allowed_is_the_models_fault(kind):
    async with sandbox_of(**kind, memory_mb=128) as sandbox:
        hog = ["python3", "-c", "held = [b'x' * (1 << 20) for _ in range(400)]; print(len(held))"]
        with contextlib.suppress(SandboxFailed):
            ran = await sandbox.exec(hog)
            assert not ran.ok, ran
            killed = kind["kind"] == "podman" and ran.code == 128 + signal.SIGKILL
            assert killed or ran.ended == "memory" or "MemoryError" in ran.stderr


@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
@pytest.mark.skipif(os.geteuid() != 0, reason="landlock gives sandboxes of root users of their own")
async def test_root_s_files_for_landlock_must_be_open_to_others(tmp_path, name):
    """Bubblewrap mounts them where its user finds them; landlock cannot."""
    tmp_path.chmod(0o700)
    (tmp_path / "table").write_text("12")
    config = SandboxConfig(kind=name, python=PYTHON, paths=[str(tmp_path / "table")])
    if name == "landlock":
        with pytest.raises(SandboxFailed, match=r"users of sandboxes may not enter /tmp/.*chmod o\+x"):
            await open_pool(config)
        for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
            folder.chmod(0o755)
    async with sandbox_of(**vars(config)) as sandbox:
        assert await sandbox.read(str(tmp_path / "table")) == b"12"
        with pytest.raises(SandboxFailed, match=r"Read-only|denied"):
            await sandbox.write(str(tmp_path / "table"), b"13")


_ASKS = "Landlock denies to open and to list, not to ask whether a path exists"
_CONTAINER = "podman's own profile of system calls allows it: it reaches the container's own only"
#: attacks that get through, by the kind of sandbox; why that is no way out
THROUGH = {
    "bubblewrap": {},
    "landlock": {
        "see_the_tree_of_the_host": _ASKS,
        "see_system_folders": _ASKS,
        "memory_as_files": "its files are on the machine's disk, and bound by sandbox.disk_mb",
    },
    "podman": {
        "see_system_folders": "an image has its own",
        "read_keys_of_the_session": _CONTAINER,
        "make_sockets_of_other_kinds": _CONTAINER,
        "make_namespaces": _CONTAINER,
        "make_namespaces_by_clone": _CONTAINER,
    },
}
AS_SOMEBODY = {
    "could_have_privileges": "only root can give up what it could gain; without set-uid programs it gains none"
}


@pytest.mark.parametrize(
    "kind",
    ["bubblewrap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("landlock", "podman"))],
    indirect=True,
)
@pytest.mark.timeout(600)
def test_no_attack_gets_out(kind):
    make = lambda: SandboxPool(_kind(kind["kind"], kind.get("image", "")), LIMITS, warm=1, most=4)
    found = asyncio.run(trial(make, list(ATTACKS)))
    expected = THROUGH[kind["kind"]]
    if os.geteuid() and kind["kind"] == "landlock":
        expected = expected | AS_SOMEBODY
    assert {name: how for name, how in found.items() if how and name not in expected} == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
@pytest.mark.timeout(280)
def test_no_attack_gets_out_of_the_sandbox_of_an_ordinary_user(name):
    make = lambda: SandboxPool(_kind(name), LIMITS, warm=1, most=4)
    found = as_somebody(lambda: asyncio.run(trial(make, list(ATTACKS))))
    expected = THROUGH[name] | (AS_SOMEBODY if name == "landlock" else {})
    assert {attack: how for attack, how in found.items() if how and attack not in expected} == {}


@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
def test_without_control_groups_no_memory_stays_unseen(monkeypatch, name):
    monkeypatch.setattr("asyncrl.sandbox.cgroups._candidates", lambda mounts, membership: [])
    make = lambda: SandboxPool(_kind(name), LIMITS, warm=1, most=4)
    found = asyncio.run(trial(make, [attack for attack in ATTACKS if attack.startswith("memory_")]))
    assert {attack: how for attack, how in found.items() if how and attack not in THROUGH[name]} == {}


@pytest.mark.parametrize("as_root", [pytest.param(True, marks=pytest.mark.slow), False])
def test_where_landlock_does_not_bound_signals_the_filter_of_system_calls_does(monkeypatch, as_root):
    """Before Linux 6.12."""
    if as_root and os.geteuid():
        pytest.skip("not root")
    monkeypatch.setattr("asyncrl.sandbox.landlock.landlock_version", lambda: 3)
    names = [name for name in ATTACKS if "runner" in name or "of_the_host" in name or name == "survive_the_timeout"]
    make = lambda: SandboxPool(_kind("landlock"), LIMITS, warm=1, most=4)
    work = lambda: asyncio.run(trial(make, names))
    found = work() if as_root or os.geteuid() else as_somebody(work)
    assert {name: how for name, how in found.items() if how and name not in THROUGH["landlock"]} == {}


def _kind(kind, image=""):
    return KINDS[kind](SandboxConfig(image=image, **vars(LIMITS)), find_interpreter(PYTHON))


@pytest.mark.parametrize(
    "name",
    [
        "read_a_file_of_the_user",
        "see_the_tree_of_the_host",
        "see_processes_of_the_host",
        "connect_to_the_host",
        "connect_to_an_abstract_socket",
        "connect_to_a_socket_in_the_file_system",
        "use_shared_memory_of_the_host",
        "read_environments_in_proc",
    ],
)
def test_attacks_get_through_without_a_sandbox(tmp_path, name):
    """Else they would show nothing."""
    host = Host(str(tmp_path))
    with contextlib.closing(host):
        pid = os.fork()
        if not pid:
            os.environ["ATTACK"] = json.dumps(host.facts)
            os._exit(int(bool(ATTACKS[name]())))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


# -- the host ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(**options):
    service = SandboxService(SandboxConfig(**{**vars(CONFIG), **options}))
    await service.start()
    running = asyncio.create_task(service.run())
    client = SandboxClient(*service.address)
    try:
        yield service, client
    finally:
        await client.close()
        running.cancel()
        await service.close()


async def test_a_service_that_is_closed_starts_no_further_host(caplog):
    service = SandboxService(CONFIG)
    await service.start()
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0)  # it watches the host
    await service.close()
    await asyncio.wait_for(running, 30)
    assert "started again" not in caplog.text


async def test_a_host_serves_the_same_calls():
    async with serving() as (_, client):
        sandbox = await client.create()
        await sandbox.write("x.py", b"import sys; print(sys.stdin.read() * 2)")
        ran = await sandbox.exec(["python3", "x.py"], stdin="ab")
        assert (ran.stdout, ran.ok) == ("abab\n", True)
        assert (await sandbox.exec(["sleep", "60"], timeout_s=0.5)).ended == "timeout"
        assert await sandbox.read("x.py") == b"import sys; print(sys.stdin.read() * 2)"
        with pytest.raises(SandboxFailed, match="No such file") as failure:
            await sandbox.read("y.py")
        assert failure.value.kind == "task"
        await sandbox.close()
        with pytest.raises(SandboxFailed, match="no such sandbox") as failure:
            await sandbox.exec(["true"])
        assert failure.value.kind == "infra"


@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
async def test_a_host_that_is_killed_takes_all_with_it_and_starts_again(name):
    async with serving(kind=name, python=PYTHON) as (service, client):
        sandbox = await client.create()
        running = asyncio.create_task(sandbox.exec(["sleep", "61.25"], timeout_s=90))
        await asyncio.sleep(0.5)
        assert _sleeping("61.25")
        (host,) = _pids_of("asyncrl.sandbox.serve", parent=None)[-1:]
        os.kill(host, signal.SIGKILL)
        with pytest.raises(SandboxFailed) as failure:
            await running
        assert failure.value.kind == "infra"
        for _ in range(100):
            with contextlib.suppress(SandboxFailed):
                other = await client.create()
                break
            await asyncio.sleep(0.1)
        assert (await other.exec(["echo", "again"])).stdout == "again\n"
        assert not _sleeping("61.25")
        await other.close()
    assert not _pids_of(service.address.url.removeprefix("unix:").removesuffix("/socket"), parent=None)


def _sleeping(argument):
    return _pids_of(f"sleep {argument}", parent=None)


def _pids_of(words, parent):
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if words in file.read().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.split("/")[2]))
    return sorted(found)


async def test_a_host_wants_its_token_and_says_what_is_wrong():
    async with serving() as (service, _):
        stranger = SandboxClient(service.address.url, "wrong")
        with pytest.raises(SandboxFailed, match="expected the token"):
            await stranger.create()
        await stranger.close()
        client = SandboxClient(*service.address)
        sandbox = await client.create()
        path = sandbox._path
        for asked in (
            {},
            {"argv": "ls"},
            {"argv": ["ls"], "timeout_s": -1},
            {"argv": ["ls"], "user": "root"},
            {"argv": []},
        ):
            with pytest.raises(SandboxFailed) as failure:
                await client.call("POST", f"{path}/exec", 5.0, json=asked)
            assert failure.value.kind == "task", asked
        await sandbox.close()
        await client.close()


# -- what serves here --------------------------------------------------------------------------------------------------


async def test_the_probe_runs_something(kind):
    found = await probe(SandboxConfig(**{**vars(CONFIG), **kind}), kind["kind"])
    assert (found.problem, bool(found.weaker)) == ("", kind["kind"] == "landlock")


@pytest.fixture
def only_these_programs(monkeypatch, tmp_path):
    """In PATH: what removes folders."""
    for name in ("rm", "chmod"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


async def test_without_bubblewrap_nothing_is_served_and_the_message_names_the_package(only_these_programs):
    with pytest.raises(SandboxFailed, match=r"apt-get install bubblewrap.*landlock serves, but .*choose sandbox.kind"):
        await open_pool(SandboxConfig(python=PYTHON))
    with pytest.raises(SandboxFailed, match="podman is not installed; apt-get install podman"):
        await open_pool(SandboxConfig(kind="podman", image="any"))


@pytest.mark.parametrize("options", [{"kind": "landlock"}, {"allow_unsafe": True}])
async def test_a_weaker_kind_serves_if_it_is_chosen_or_allowed(only_these_programs, options):
    async with await open_pool(SandboxConfig(warm=0, python=PYTHON, **options)) as pool:
        assert (pool.kind.name, bool(pool.kind.weaker)) == ("landlock", True)


@pytest.fixture
def stand_in_for_podman(only_these_programs):
    """In its folder: ``log`` of its calls, and a file for each container. It runs the runner."""
    program = only_these_programs / "podman"
    program.write_text(PODMAN.format(folder=only_these_programs, bwrap=BWRAP, python=PYTHON))
    program.chmod(0o755)
    return only_these_programs


async def test_podman_is_asked_for_a_container_that_can_do_nothing_and_to_remove_it(stand_in_for_podman):
    folder = stand_in_for_podman
    async with sandbox_of(kind="podman", image="some/image", paths=[str(folder)], memory_mb=100, disk_mb=50) as sandbox:
        assert (await sandbox.exec([PYTHON, "-c", "print(6 * 7)"])).stdout == "42\n"
        running = [line for line in (folder / "log").read_text().splitlines() if line.startswith("run ")][-1]
    for wanted in (
        *("--network none", "--read-only", "--cap-drop all", "--security-opt no-new-privileges", "--pull never"),
        *("--pids-limit 65", "--memory 116m --memory-swap 116m", "--tmpfs /sandbox:size=50m", "--user "),
        *(f"--volume {folder}:{folder}:ro ", "/runner.py:ro", "--entrypoint python3 some/image -I -S /runner.py "),
    ):
        assert wanted in running
    assert "privileged" not in running.replace("no-new-privileges", "")
    container = running.split("--name ")[1].split()[0]
    assert (folder / "log").read_text().splitlines()[-1] == f"rm --force --ignore --time 0 {container}"


async def test_a_host_that_is_closed_leaves_no_container_behind(stand_in_for_podman):
    """Containers go on when their clients are killed."""
    (stand_in_for_podman / "asyncrl-1-0").touch()  # somebody else's
    async with serving(kind="podman", image="some/image", warm=2) as (_, client):
        await client.create()
        while len(list(stand_in_for_podman.glob("asyncrl-*"))) < 4:  # and two that are ready
            await asyncio.sleep(0.1)
    assert [path.name for path in stand_in_for_podman.glob("asyncrl-*")] == ["asyncrl-1-0"]


async def test_podman_refuses_what_it_would_not_use(only_these_programs):
    for options in ({"python": PYTHON}, {"paths": ["/usr/a:b"]}):
        with pytest.raises(SandboxFailed, match=rf"sandbox.{next(iter(options))}: podman"):
            await open_pool(SandboxConfig(kind="podman", image="any", **options))


def test_the_user_of_a_sandbox_that_is_in_use_is_nobody_elses():
    users, others = Users(), Users()
    if not users.own:
        pytest.skip("not root")
    uid = users.take()
    assert others.take() != uid


def test_a_full_disk_costs_no_user_of_sandboxes(monkeypatch):
    """And leaves nothing behind."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # for the users of sandboxes
        monkeypatch.setattr("tempfile.tempdir", folder)
        try:
            kind = _kind("landlock")
        except SandboxFailed as e:
            pytest.skip(str(e))
        before, mkdir = (os.listdir(folder), len(kind._users._free)), os.mkdir

        def full(path, *mode):
            if os.path.basename(path) == ".tmp":
                raise OSError(28, "No space left on device", path)
            mkdir(path, *mode)

        with monkeypatch.context() as disk:
            disk.setattr("os.mkdir", full)
            with pytest.raises(OSError, match="No space left"):
                kind.launch(False)
        assert (os.listdir(folder), len(kind._users._free)) == before
        kind.close()


async def test_an_interpreter_that_does_not_run_is_refused():
    with pytest.raises(SandboxFailed, match=r"sandbox.python: expected a Python interpreter, found /bin/false"):
        await open_pool(SandboxConfig(python="/bin/false"))


async def test_without_control_groups_memory_is_measured(tmp_path, monkeypatch):
    for name in ("mounts", "cgroup"):
        (tmp_path / name).write_text("")
    assert Cgroups(str(tmp_path / "mounts"), str(tmp_path / "cgroup")).version == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "remote"}, "sandbox.url: expected the host"),
        (
            {"kind": "remote", "url": "http://h:1", "memory_mb": 99},
            "sandbox.memory_mb: the host of sandbox.url decides",
        ),
        ({"kind": "remote", "url": "http://h:1", "paths": ["/data"]}, "sandbox.paths: the host of sandbox.url decides"),
        ({"url": "http://h:1"}, "sandbox.url: expected none with sandbox.kind=auto"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        SandboxConfig(**options)


@pytest.mark.parametrize("options", [["--memory-mb", "0"], ["--port", "99999"], ["--kind", "podman"]])
def test_a_host_with_wrong_options_says_so_in_one_line(options, monkeypatch, capsys):
    monkeypatch.setenv("ASYNCRL_SANDBOX_TOKEN", "secret")
    with pytest.raises(SystemExit):
        serve_or_probe(["serve", *options])
    assert re.search(r"error: .*(memory_mb|--port|sandbox\.image): ", capsys.readouterr().err)


def test_limits_have_defaults_that_a_config_may_change():
    assert Limits() == Limits(SandboxConfig().memory_mb, SandboxConfig().processes, SandboxConfig().disk_mb)
