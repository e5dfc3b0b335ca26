"""What code in a sandbox may try: ways out, ways in, and ways to use up the machine.

The module is copied into a sandbox and runs there by itself: ``python3 attacks.py NAME``, with what it may look for in
``ATTACK`` (JSON, `tests.support.sandbox_trial`). An attack that returns True got through; exit status 42 says so.
What an attack cannot see itself is checked outside: `BOMBS` must leave the machine as it was.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

ESCAPED = 42
ATTACKS = {}
#: end by their time limit or a limit of the sandbox; what they leave behind is looked for outside
BOMBS = {"fork_bomb", "thread_bomb", "memory_bomb", "memory_by_many", "disk_fill", "file_bomb", "survive_the_timeout"}
BOMBS |= {"disk_fill_by_many", "disk_fill_with_removed_files", "outlive_the_runner"}

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x00020000
libc = ctypes.CDLL(None, use_errno=True)


def attack(function):
    ATTACKS[function.__name__] = function
    return function


def facts():
    return json.loads(os.environ["ATTACK"])


def contains_secret(*paths):
    for path in paths:
        try:
            with open(path, "rb") as file:
                found = file.read(1 << 20)
                at = found.find(facts()["secret"].encode())
                if at >= 0 and found[at + len(facts()["secret"]) :][:1].isalnum():  # the rest, which we were not given
                    return True
        except OSError:
            continue
    return False


def can_open(path, mode="rb"):
    try:
        with open(path, mode):
            return True
    except OSError:
        return False


def worked(result):
    return result != -1


def syscall(name_or_number, *args):
    numbers = {"ptrace": 101, "process_vm_readv": 310, "kexec_load": 246, "init_module": 175, "bpf": 321, "setns": 308}
    numbers |= {"perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "add_key": 248, "keyctl": 250}
    numbers |= {"capget": 125, "inotify_init1": 294, "inotify_add_watch": 254, "ioprio_set": 251}
    numbers |= {"open_by_handle_at": 304, "mount": 165, "clone3": 435, "pivot_root": 155, "fsopen": 430, "mknod": 133}
    number = numbers.get(name_or_number, name_or_number)
    if os.uname().machine != "x86_64":  # others have other numbers
        return -1
    libc.syscall.restype = ctypes.c_long
    return libc.syscall(ctypes.c_long(number), *args)


# -- to read what is not the sandbox's ---------------------------------------------------------------------------------


@attack
def read_shadow():
    return can_open("/etc/shadow")


@attack
def read_a_file_of_the_user():
    return contains_secret(facts()["secret_file"])


@attack
def list_homes():
    found = []
    for path in ("/root", "/home"):
        try:
            found += os.listdir(path)
        except OSError:
            continue
    return bool(found)


@attack
def see_the_tree_of_the_host():
    return any(os.path.exists(path) for path in (os.path.dirname(facts()["secret_file"]), "/boot", "/srv", "/mnt"))


@attack
def see_system_folders():
    return any(os.path.exists(path) for path in ("/var", "/run", "/sys", "/etc/hostname"))


@attack
def list_the_tree_of_the_host():
    for path in ("/boot", "/etc/ssl", "/var/lib", "/run/systemd", os.path.dirname(facts()["secret_file"])):
        try:
            if os.listdir(path):
                return True
        except OSError:
            continue
    return False


@attack
def read_through_roots_in_proc():
    return contains_secret(*(f"/proc/{pid}/root{facts()['secret_file']}" for pid in (1, facts()["pid"], "self")))


@attack
def read_environments_in_proc():
    return contains_secret(*glob.glob("/proc/[0-9]*/environ"), "/proc/self/environ")


@attack
def find_the_secret_in_the_environment():
    return any(facts()["secret"] in value for name, value in os.environ.items() if name != "ATTACK")


@attack
def see_processes_of_the_host():
    return len(glob.glob("/proc/[0-9]*")) > 3 or any(
        "asyncrl" in open(p).read() for p in glob.glob("/proc/[0-9]*/comm")
    )


@attack
def use_inherited_descriptors():
    for number in range(3, 1024):
        try:
            os.fstat(number)
            return True
        except OSError:
            continue
    return False


@attack
def find_the_file_of_another_sandbox():
    seen = [
        os.path.join(folder, n)
        for top in (os.environ["HOME"], *glob.glob(f"{os.environ['HOME']}/../*sandbox*"), "/tmp", "/dev/shm")
        for folder, _, ns in os.walk(top)
        for n in ns
    ]
    return any("other" in os.path.basename(path) for path in seen)


@attack
def read_kernel_memory():
    return any(can_open(path) for path in ("/dev/mem", "/dev/kmem", "/proc/kcore", "/dev/port", "/dev/kmsg"))


@attack
def open_disks():
    return any(can_open(path) for path in glob.glob("/dev/[sv]d*") + glob.glob("/dev/nvme*") + ["/dev/vda", "/dev/sda"])


@attack
def open_files_by_handle():
    return worked(syscall("open_by_handle_at", -100, ctypes.create_string_buffer(64), 0))


@attack
def read_keys_of_the_session():
    return worked(syscall("keyctl", 0, -3, 1)) or worked(syscall("add_key", b"user", b"k", b"v", 1, -3))


# -- to talk to others -------------------------------------------------------------------------------------------------


@attack
def connect_to_the_host():
    try:
        socket.create_connection(("127.0.0.1", facts()["port"]), timeout=2).close()
        return True
    except OSError:
        return False


@attack
def connect_to_an_abstract_socket():
    with socket.socket(socket.AF_UNIX) as s:
        return s.connect_ex("\0" + facts()["abstract"]) == 0


@attack
def connect_to_a_socket_in_the_file_system():
    with socket.socket(socket.AF_UNIX) as s:
        return s.connect_ex(facts()["socket"]) == 0


@attack
def send_datagrams():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.sendto(b"hello", ("127.0.0.1", facts()["port"]))
        except OSError:
            return False
    return False  # who listens at the host has the last word


@attack
def send_datagrams_by_a_pair():
    """A pair is connected, yet its datagrams may have another address."""
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            pair = socket.socketpair(socket.AF_UNIX, kind)
            pair[0].sendto(b"hello", facts()["datagrams"])
        except OSError:
            continue
    return False  # likewise


@attack
def have_an_interface():
    found = set()
    try:
        found |= {name for _, name in socket.if_nameindex()}
        found |= set(os.listdir("/proc/sys/net/ipv4/conf"))
    except OSError:
        pass
    return bool(found - {"all", "default", "lo"})


@attack
def make_sockets_of_other_kinds():
    for family, kind in (
        (16, socket.SOCK_RAW),
        (17, socket.SOCK_RAW),
        (40, socket.SOCK_STREAM),
        (38, socket.SOCK_SEQPACKET),
    ):
        try:
            socket.socket(family, kind).close()
            return True
        except OSError:
            continue
    return False


@attack
def make_raw_sockets():
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()
        return True
    except OSError:
        return False


@attack
def use_shared_memory_of_the_host():
    return worked(libc.shmget(facts()["shm"], 0, 0))


@attack
def open_a_message_queue_of_the_host():
    return worked(libc.mq_open(facts()["queue"].encode(), os.O_RDWR))


@attack
def watch_files_of_the_host():
    watch = syscall("inotify_init1", 0)
    return watch >= 0 and worked(
        syscall("inotify_add_watch", watch, os.path.dirname(facts()["secret_file"]).encode(), 2)
    )


@attack
def type_into_the_terminal():
    return worked(libc.ioctl(0, 0x5412, b"x"))


# -- to change the system ----------------------------------------------------------------------------------------------


@attack
def write_to_the_system():
    return any(
        can_open(f"{folder}/escape", "wb") for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/lib", "/proc")
    )


@attack
def change_a_file_of_the_host():
    """Without opening it."""
    path = facts()["secret_file"]
    for change in (
        lambda: os.chmod(path, 0o666),
        lambda: os.utime(path, (1, 1)),
        lambda: os.chown(path, os.getuid(), -1),
        lambda: os.truncate(path, 0),
        lambda: os.setxattr(path, "user.mark", b"1"),
        lambda: os.rename(path, f"{path}-2"),
        lambda: os.link(path, "linked"),
        lambda: os.unlink(path),
        lambda: os.rmdir(os.path.dirname(path)),
    ):
        try:
            change()
            return True
        except OSError:
            continue
    return False


@attack
def replace_programs():
    return can_open("/usr/bin/true", "r+b") or can_open("/etc/passwd", "r+b") or can_open("/runner.py", "r+b")


@attack
def mount_a_file_system():
    os.makedirs("m", exist_ok=True)
    return worked(libc.mount(b"none", b"m", b"tmpfs", 0, None)) or worked(syscall("fsopen", b"tmpfs", 0))


@attack
def make_the_system_writable():
    return worked(libc.mount(b"none", b"/", None, ctypes.c_ulong(32), None))


@attack
def unmount():
    return worked(libc.umount2(b"/proc", 2)) or worked(libc.umount2(b"/sandbox", 2))


@attack
def change_the_root():
    os.makedirs("r/o", exist_ok=True)
    return worked(syscall("pivot_root", b"r", b"r/o")) or worked(libc.chroot(b"r"))


@attack
def set_kernel_options():
    paths = ("kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory", "kernel/hostname", "fs/suid_dumpable")
    return any(can_open(f"/proc/sys/{path}", "r+b") for path in paths) or can_open("/proc/sysrq-trigger", "wb")


@attack
def make_devices():
    return worked(syscall("mknod", b"disk", 0o60666, os.makedev(254, 0))) and can_open("disk")


@attack
def set_clock_and_name():
    return worked(libc.sethostname(b"mine", 4)) or worked(libc.clock_settime(0, ctypes.create_string_buffer(16)))


@attack
def reboot():
    return worked(libc.reboot(0))


@attack
def load_kernel_code():
    code = ctypes.create_string_buffer(128)
    return (
        worked(syscall("init_module", code, 128, b""))
        or worked(syscall("bpf", 5, code, 128))
        or worked(syscall("kexec_load", 0, 0, None, 0))
    )


@attack
def use_risky_interfaces():
    code = ctypes.create_string_buffer(256)
    return any(
        worked(syscall(name, *args))
        for name, args in (
            ("perf_event_open", (code, 0, -1, -1, 0)),
            ("userfaultfd", (1,)),
            ("io_uring_setup", (1, code)),
        )
    )


@attack
def move_to_another_control_group():
    found = glob.glob("/sys/fs/cgroup/cgroup.procs") + glob.glob("/sys/fs/cgroup/*/cgroup.procs")
    return any(can_open(path, "r+b") for path in found)


# -- to become somebody ------------------------------------------------------------------------------------------------


@attack
def become_root():
    return not libc.setuid(0) or not libc.setresgid(0, 0, 0) or not libc.setgroups(1, (ctypes.c_int * 1)(0))


@attack
def run_set_uid_programs():
    programs = [p for p in glob.glob("/usr/bin/*") + glob.glob("/usr/sbin/*") if os.stat(p).st_mode & 0o6000]
    shutil.copyfile("/usr/bin/id", "id")
    with contextlib.suppress(OSError):
        os.chmod("id", 0o6755)
    said = ""
    with contextlib.suppress(OSError):
        said = subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout.strip()
    for program in programs:
        if program.endswith("su"):
            subprocess.run([program, "-c", "id -u > root"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    return said == "0" or os.path.exists("root")


@attack
def have_privileges():
    header, data = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    if syscall("capget", header, data) or any(data.raw):
        return True
    return libc.prctl(39, 0, 0, 0, 0) != 1  # may gain some


@attack
def could_have_privileges():
    return any(libc.prctl(23, capability, 0, 0, 0) == 1 for capability in range(41))


@attack
def make_namespaces():
    return any(
        worked(libc.unshare(flags)) for flags in (CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER | CLONE_NEWNS)
    )


@attack
def make_namespaces_by_clone():
    pid = syscall(56, CLONE_NEWUSER | signal.SIGCHLD, None, None, None, None)
    if pid == 0:
        os._exit(0)
    arguments = (ctypes.c_uint64 * 8)(CLONE_NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    other = syscall("clone3", arguments, 64)
    if other == 0:
        os._exit(0)
    return pid > 0 or other > 0


@attack
def enter_namespaces():
    for path in glob.glob("/proc/1/ns/*"):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        if worked(syscall("setns", descriptor, 0)):
            return True
    return False


@attack
def use_other_system_call_tables():
    """x32's numbers, which a filter may forget."""
    pid = os.fork()
    if not pid:
        os._exit(7 if worked(syscall(0x40000000 | 521, 16, 1, None, None)) else 0)  # ptrace
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@attack
def raise_own_limits():
    for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        try:
            resource.setrlimit(limit, (resource.getrlimit(limit)[1] + 1000,) * 2)
            return True
        except (ValueError, OSError):
            continue
    return False


@attack
def run_before_others():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return True
    except OSError:
        pass
    try:
        return os.nice(-10) < 0
    except OSError:
        return False


# -- to take over what runs the sandbox --------------------------------------------------------------------------------


@attack
def trace_the_runner():
    return worked(syscall("ptrace", 16, 1, None, None)) or worked(syscall("ptrace", 0x4206, 1, None, None))


@attack
def read_the_memory_of_the_runner():
    local, remote = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    return worked(syscall("process_vm_readv", 1, local, 1, remote, 1, 0)) or can_open("/proc/1/mem", "r+b")


@attack
def answer_in_place_of_the_runner():
    for number in range(32):
        try:
            descriptor = os.open(f"/proc/1/fd/{number}", os.O_WRONLY)
            os.write(descriptor, b"\0" * 20)
            return True
        except OSError:
            continue
    return False


@attack
def kill_the_runner():
    for sent in (signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP, signal.SIGKILL):
        for pid in (1, os.getppid()):
            try:
                os.kill(pid, sent)
            except OSError:
                continue
    time.sleep(0.2)
    return False  # the sandbox must still answer, or have ended, which is tried next


@attack
def stop_the_runner():
    for pid in (1, os.getppid()):
        try:
            os.kill(pid, signal.SIGSTOP)
        except OSError:
            continue
    return False  # likewise


@attack
def outlive_the_runner():
    """It is looked for when all sandboxes are closed."""
    runner = os.getppid()
    for _ in range(3):
        if os.fork():
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                os.kill(runner, signal.SIGKILL)
            os._exit(0)
        os.setsid()
    time.sleep(600)


@attack
def kill_processes_of_the_host():
    for pid in {facts()["pid"], 2, 3, 4}:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(os.pidfd_open(facts()["pid"]), signal.SIGKILL)
    reader, writer = os.pipe()  # a file that becomes ready sends a signal
    for command, value in ((8, facts()["pid"]), (10, signal.SIGKILL), (fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)):
        with contextlib.suppress(OSError):
            fcntl.fcntl(reader, command, value)
    os.write(writer, b"x")
    return False


@attack
def limit_processes_of_the_host():
    most = (ctypes.c_uint64 * 2)(1, 1)
    return any(worked(libc.prlimit64(facts()["pid"], limit, most, None)) for limit in (0, 7))


@attack
def slow_processes_of_the_host():
    pid, nothing = facts()["pid"], ctypes.create_string_buffer(8)
    for change in (
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
        lambda: os.sched_setaffinity(pid, {0}),
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
    ):
        with contextlib.suppress(OSError):
            change()
    return worked(syscall("ioprio_set", 1, pid, 3 << 13)) or worked(libc.sched_setparam(pid, nothing))


@attack
def leave_links_for_the_host():
    """The host reads and writes these by the sandbox's own calls afterwards."""
    os.symlink("/etc/shadow", "link")
    os.symlink(facts()["secret_file"], "secret-link")
    os.mkfifo("pipe")
    os.symlink("/dev/zero", "endless")
    return False


@attack
def flood_the_output():
    chunk = b"x" * 65536
    until = time.monotonic() + 1
    while time.monotonic() < until:
        os.write(1, chunk)
        os.write(2, chunk)
    return False


# -- to use up the machine ---------------------------------------------------------------------------------------------


@attack
def fork_bomb():
    while True:
        try:
            os.fork()
        except OSError as e:
            if e.errno != errno.EAGAIN:
                raise


@attack
def thread_bomb():
    while True:
        try:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        except RuntimeError:
            time.sleep(0.01)


@attack
def memory_bomb():
    held = []
    while True:
        held.append(b"x" * (8 << 20))


@attack
def memory_by_many():
    """Each process stays below the limit; together they do not."""
    for _ in range(8):
        if not os.fork():
            held = b"x" * (96 << 20)
            time.sleep(60)
            os._exit(len(held) & 1)
    time.sleep(60)


@attack
def memory_that_nobody_maps():
    """Written to files that have no name; each stays below the limit of a file."""
    kept, chunk = [], b"x" * (1 << 20)
    with contextlib.suppress(OSError):
        while len(kept) < facts()["memory_bytes"] >> 24:
            kept.append(os.memfd_create("kept"))
            for _ in range(16):
                os.write(kept[-1], chunk)
    time.sleep(2)
    return len(kept) >= facts()["memory_bytes"] >> 24


@attack
def memory_that_nobody_maps_any_more():
    """Segments live until they are removed."""
    libc.shmat.restype, made = ctypes.c_void_p, 0
    for _ in range(facts()["memory_bytes"] >> 24):
        segment = libc.shmget(0, 16 << 20, 0o600)
        at = libc.shmat(segment, None, 0)
        if segment < 0 or at in (None, ctypes.c_void_p(-1).value):
            break
        ctypes.memset(at, 1, 16 << 20)
        libc.shmdt(ctypes.c_void_p(at))
        made += 1
    time.sleep(2)
    return made >= facts()["memory_bytes"] >> 24


@attack
def memory_as_files():
    """As many files as there may be, with memory that stays below the limit without them."""
    chunk = b"x" * (1 << 20)
    with contextlib.suppress(OSError):
        for number in range(6):
            with open(f"fill{number}", "wb") as file:
                for _ in range(9):
                    file.write(chunk)
    held = b"x" * (facts()["memory_bytes"] - (48 << 20))
    time.sleep(2)
    return bool(held)


@attack
def disk_fill():
    written = 0
    for folder in (os.getcwd(), "/tmp", "/dev/shm", "/dev", "/var/tmp", "/"):
        try:
            with open(os.path.join(folder, "fill"), "wb") as file:
                while file.write(b"x" * (1 << 20)):
                    written += 1 << 20
        except OSError:
            continue
    return written > facts()["disk_bytes"]


@attack
def disk_fill_by_many():
    """Each file stays below the limit; together they do not. They are kept for longer than anybody measures."""
    written, chunk = 0, b"x" * (1 << 20)
    with contextlib.suppress(OSError):
        for number in range(8):
            with open(f"fill{number}", "wb") as file:
                for _ in range(32):
                    written += file.write(chunk)
    time.sleep(2)
    return written > facts()["disk_bytes"]


@attack
def disk_fill_with_removed_files():
    written, chunk, kept = 0, b"x" * (1 << 20), []
    with contextlib.suppress(OSError):
        for _ in range(8):
            kept.append(open("fill", "wb"))  # noqa: SIM115
            os.unlink("fill")
            for _ in range(32):
                written += kept[-1].write(chunk)
    time.sleep(2)
    return written > facts()["disk_bytes"]


@attack
def file_bomb():
    number = 0
    while True:
        try:
            open(f"f{number}", "w").close()
        except OSError:
            time.sleep(0.1)
        number += 1


@attack
def survive_the_timeout():
    for sent in range(1, 32):
        if sent not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(sent, signal.SIG_IGN)
    for _ in range(3):  # away from sessions and parents
        if os.fork():
            time.sleep(60)
        os.setsid()
    while True:
        with open("alive", "w") as file:
            file.write(str(time.monotonic()))
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(ESCAPED if ATTACKS[sys.argv[1]]() else 0)
