"""System calls that a sandbox denies, as a filter for the kernel; made by libseccomp, which Debian always has."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import tempfile

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CMP_NE, _CMP_EQ, _CMP_GT, _CMP_MASKED_EQ = 1, 4, 6, 7
_INT = 0xFFFFFFFF  # what the kernel reads of an argument that is an int

#: Of the kernel's interfaces that a program does not need, those that let it look into others, change what is mounted,
#: or that have often been the way out. New namespaces would give it privileges over itself.
_DENIED = """
acct add_key bpf chroot clock_adjtime clock_settime delete_module fanotify_init finit_module fsconfig fsmount fsopen
fspick init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl
lookup_dcookie mbind migrate_pages modify_ldt mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl
open_by_handle_at open_tree perf_event_open personality pidfd_getfd pivot_root process_madvise process_vm_readv
process_vm_writev ptrace quotactl quotactl_fd reboot request_key set_mempolicy setdomainname sethostname setns
settimeofday stime swapoff swapon syslog umount umount2 unshare uselib userfaultfd vhangup vm86 vm86old
""".split()
_NEW_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00000080)
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_STREAM, _SOCK_SEQPACKET = 1, 5  # a pair of datagram sockets could send to others
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # would type into the terminal

#: Without namespaces of its own, a sandbox would share these with all of its user's processes: queues, memory, and news
#: of files.
_SHARED = """
inotify_add_watch inotify_init inotify_init1 listmount mq_open mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop
semtimedop shmat shmctl statmount
""".split()
#: What makes memory that no process need show as its own, so that a measurement misses it.
_UNSEEN = "memfd_create memfd_secret shmget".split()
#: System calls of which this argument names another process, unless it is 0: they would limit it or slow it down.
_OF_PROCESSES = {
    "prlimit64": 0,
    "sched_setaffinity": 0,
    "sched_setattr": 0,
    "sched_setparam": 0,
    "sched_setscheduler": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
_KINDS_OF_PROCESSES = {"setpriority": 0, "ioprio_set": 1}  # which argument 0 names a process, not a group or a user

#: Landlock does not cover these, so that they would change files of the sandbox's user anywhere.
_OF_OWNERS = """
chmod chown fchmod fchmodat fchmodat2 fchown fchownat file_setattr fremovexattr fsetxattr futimesat lchown lremovexattr
lsetxattr removexattr removexattrat setxattr setxattrat utime utimes
""".split()

#: All that sends a signal; by fcntl, also a file that becomes ready.
_SIGNALS = "kill pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo tgkill tkill".split()
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902


class SeccompError(RuntimeError):
    """No filter can be made here."""


class _Comparison(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


@functools.cache
def seccomp_filter(
    *, namespaces: bool = True, bound: bool = True, own_user: bool = True, signals: bool = True
) -> bytes:
    """Program for this machine's architecture; what it denies fails with EPERM. Raises SeccompError.

    ``namespaces``: the sandbox has its own; if not, it makes no sockets but connected pairs, and shares nothing with
    processes of its user. ``bound``: a control group bounds its memory; if not, it has none that no process maps.
    ``own_user``: its user owns nothing else; if not, owners and modes of files cannot be changed. ``signals``:
    something else keeps signals inside; if not, none can be sent."""
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError as e:
        raise SeccompError(f"libseccomp.so.2 is missing ({e}); apt-get install libseccomp2") from None
    library.seccomp_init.restype = ctypes.c_void_p
    made = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not made:
        raise SeccompError("libseccomp makes no filter on this architecture")

    def deny(name: str, error: int, *comparisons: _Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:  # not known on this architecture, or to this library
            return
        array = (_Comparison * len(comparisons))(*comparisons)
        failed = library.seccomp_rule_add_array(
            made, ctypes.c_uint32(_ERRNO | error), number, ctypes.c_uint(len(comparisons)), array
        )
        if failed:
            raise SeccompError(f"libseccomp: rule for {name}: {os.strerror(-failed)}")

    try:
        for name in _DENIED:
            deny(name, errno.EPERM)
        for flag in _NEW_NAMESPACES:
            deny("clone", errno.EPERM, _Comparison(0, _CMP_MASKED_EQ, flag, flag))
        deny("clone3", errno.ENOSYS)  # its flags are in memory, where no filter looks; C libraries fall back to clone
        for request in (_TIOCSTI, _TIOCLINUX):
            deny("ioctl", errno.EPERM, _Comparison(1, _CMP_MASKED_EQ, _INT, request))
        if namespaces:
            deny("socket", errno.EAFNOSUPPORT, _Comparison(0, _CMP_GT, _AF_INET6))
            for family in set(range(_AF_INET6)) - {_AF_UNIX, _AF_INET}:
                deny("socket", errno.EAFNOSUPPORT, _Comparison(0, _CMP_EQ, family))
        else:
            deny("socket", errno.EPERM)
            deny("socketpair", errno.EAFNOSUPPORT, _Comparison(0, _CMP_NE, _AF_UNIX))
            for kind in set(range(16)) - {_SOCK_STREAM, _SOCK_SEQPACKET}:
                deny("socketpair", errno.EPERM, _Comparison(1, _CMP_MASKED_EQ, 15, kind))
            for name in _SHARED:
                deny(name, errno.EPERM)
            for name, argument in _OF_PROCESSES.items():
                deny(name, errno.EPERM, _Comparison(argument, _CMP_NE, 0))
            for name, of_process in _KINDS_OF_PROCESSES.items():
                deny(name, errno.EPERM, _Comparison(0, _CMP_NE, of_process))
        if not (namespaces and bound):
            for name in _UNSEEN:
                deny(name, errno.EPERM)
        if not own_user:
            for name in _OF_OWNERS:
                deny(name, errno.EPERM)
            deny("utimensat", errno.EPERM, _Comparison(1, _CMP_NE, 0))  # 0: of a file that it could open
        if not signals:
            for name in _SIGNALS:
                deny(name, errno.EPERM)
            for command in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX):
                deny("fcntl", errno.EPERM, _Comparison(1, _CMP_MASKED_EQ, _INT, command))
            for request in (_FIOSETOWN, _SIOCSPGRP):
                deny("ioctl", errno.EPERM, _Comparison(1, _CMP_MASKED_EQ, _INT, request))
        with tempfile.TemporaryFile() as file:
            if failed := library.seccomp_export_bpf(made, file.fileno()):
                raise SeccompError(f"libseccomp: {os.strerror(-failed)}")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(made)
