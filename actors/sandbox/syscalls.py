"""A filter of system calls for programs in a sandbox (seccomp): a few that no such program needs fail with EPERM.

They keep memory that no process is charged with (memory files, System V segments), look into other processes, use up
what all users of a machine share, slow down the supervisor, or are large parts of the kernel that faults are found in
year after year. A few others are refused with some arguments only: ARGUMENTS."""

from __future__ import annotations

import errno
import platform
import struct
from typing import Final, NamedTuple

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
    "pidfd_getfd": (438, 438),
    "syslog": (103, 116),
    "io_setup": (206, 0),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}


class Argument(NamedTuple):
    """A call that is refused, or only allowed, with some values of one argument."""

    numbers: tuple[int, int]
    argument: int
    mask: int
    """Bits of the argument that are looked at."""
    values: tuple[int, ...]
    allowed: bool
    """`values` are the allowed ones, and not the refused ones."""


_ALL: Final = 0xFFFFFFFF
_SHARED_WITHOUT_A_FILE, _HUGE, _PAGE_OUT = 0x21, 0x40000, 21
_SOCKETS: Final = (1, 2, 10)
"""Unix, IPv4, IPv6: these are each network namespace's own. The machine's virtual sockets (AF_VSOCK) are not."""
ARGUMENTS: Final = {
    # Pages of a shared mapping stay when a process says that it does not need them: they are no longer its own then.
    "mmap": Argument((9, 222), 3, _SHARED_WITHOUT_A_FILE, (_SHARED_WITHOUT_A_FILE,), allowed=False),
    "mmap with huge pages": Argument((9, 222), 3, _HUGE, (_HUGE,), allowed=False),
    "madvise": Argument((28, 233), 2, _ALL, (_PAGE_OUT,), allowed=False),
    "prlimit64": Argument((302, 261), 0, _ALL, (0,), allowed=True),
    "socket": Argument((41, 198), 0, _ALL, _SOCKETS, allowed=True),
    "socketpair": Argument((53, 199), 0, _ALL, _SOCKETS, allowed=True),
}
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
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
        (_AT_LEAST, 0, 1, 0x40000000),  # another numbering of the same calls
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for each in ARGUMENTS.values():
        checks = [
            (_LOAD, 0, 0, 16 + 8 * each.argument),
            (_AND, 0, 0, each.mask),
        ]  # its lower half: both are little-endian
        for value in each.values:
            checks += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW if each.allowed else _REFUSE)]
        checks.append((_RETURN, 0, 0, _REFUSE) if each.allowed else (_LOAD, 0, 0, 0))
        program += [(_EQUAL, 0, len(checks), each.numbers[column]), *checks]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
