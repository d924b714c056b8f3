"""A filter of system calls for programs in a sandbox (seccomp): a few that no such program needs fail with EPERM.

They keep memory that no process is charged with (memory files, System V segments), look into other processes, or are
large parts of the kernel that faults are found in year after year."""

from __future__ import annotations

import errno
import platform
import struct
from typing import Final

# names: (number on x86_64, number on aarch64), from the kernel's tables unistd_64.h and asm-generic/unistd.h
REFUSED: Final = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
}
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM


def seccomp_filter() -> bytes | None:
    """The filter as the kernel reads it (an array of struct sock_filter); None on a machine of another kind."""
    if platform.machine() not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[platform.machine()]
    numbers = [each[column] for each in REFUSED.values()]
    program = [
        (_LOAD, 0, 0, 4),  # the architecture of the call
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # its number
        (_AT_LEAST, len(numbers) + 1, 0, 0x40000000),  # another numbering of the same calls
    ]
    for i, number in enumerate(numbers):
        program.append((_EQUAL, len(numbers) - i, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
