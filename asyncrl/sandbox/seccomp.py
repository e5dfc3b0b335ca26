"""System calls that a sandbox denies, as a filter for the kernel; made by libseccomp, which Debian always has."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import tempfile

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CMP_EQ, _CMP_GT, _CMP_MASKED_EQ = 4, 6, 7

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
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # would type into the terminal


class SeccompError(RuntimeError):
    """No filter can be made here."""


class _Comparison(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


@functools.cache
def seccomp_filter(network: bool = True) -> bytes:
    """Program for this machine's architecture; what it denies fails with EPERM. Without ``network`` only sockets of the
    Unix domain can be made. Raises SeccompError."""
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
        families = (_AF_UNIX, _AF_INET, _AF_INET6) if network else (_AF_UNIX,)
        deny("socket", errno.EAFNOSUPPORT, _Comparison(0, _CMP_GT, max(families)))
        for family in set(range(max(families))) - set(families):
            deny("socket", errno.EAFNOSUPPORT, _Comparison(0, _CMP_EQ, family))
        for request in (_TIOCSTI, _TIOCLINUX):
            deny("ioctl", errno.EPERM, _Comparison(1, _CMP_MASKED_EQ, 0xFFFFFFFF, request))
        with tempfile.TemporaryFile() as file:
            if failed := library.seccomp_export_bpf(made, file.fileno()):
                raise SeccompError(f"libseccomp: {os.strerror(-failed)}")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(made)
