"""The system calls that a sandbox may not make, as a seccomp filter for ``bwrap --seccomp``.

Namespaces and resource limits leave gaps: memory that no process has mapped (memfd, System V shared memory, keys) is
bounded by no resource limit; a program may make a user namespace of its own, be root in it and mount a tmpfs of any
size; VSOCK and netlink sockets know no network namespace. Here those calls fail (EPERM, EAFNOSUPPORT), as do the parts
of the kernel that only administrators and debuggers need.

The filter is classic BPF over ``struct seccomp_data``: the number of the call at offset 0, the architecture at 4, the
low half of the first argument at 16 (seccomp(2)). Numbers are those of the kernel's tables for x86_64 and aarch64.
"""

from __future__ import annotations

import errno
import os
import struct

# name: (x86_64, aarch64)
DENIED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "acct": (163, 89), "quotactl": (179, 60), "open_by_handle_at": (304, 265),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_X32 = 0x40000000  # numbers of the second table of x86_64 start here

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(reason: int) -> bytes:
    return _step(_RETURN, _ERRNO | reason)


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The filter for a machine (default: this one); None where its numbers are not known here."""
    known = _ARCHITECTURES.get(machine or os.uname().machine)
    if known is None:
        return None
    column, architecture = known
    steps = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER)]
    if column == 0:
        steps += [_step(_AT_LEAST, _X32, 0, 1), _refuse(errno.EPERM)]
    for numbers in DENIED.values():
        steps += [_step(_EQUAL, numbers[column], 0, 1), _refuse(errno.EPERM)]
    # its flags lie in memory, where a filter cannot look; without it the C library takes clone
    steps += [_step(_EQUAL, _CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    steps += [_step(_EQUAL, _CLONE[column], 0, 4), _step(_LOAD, _ARGUMENT), _step(_ANY_BIT, _NAMESPACE_FLAGS, 0, 1)]
    steps += [_refuse(errno.EPERM), _step(_RETURN, _ALLOW)]
    families = [_step(_EQUAL, family, len(_FAMILIES) - i) for i, family in enumerate(_FAMILIES)]
    steps += [_step(_EQUAL, _SOCKET[column], 0, len(families) + 2), _step(_LOAD, _ARGUMENT), *families]
    return b"".join([*steps, _refuse(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)])
