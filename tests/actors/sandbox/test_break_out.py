"""Programs that go around a sandbox's limits, or at its supervisor."""

from __future__ import annotations

import socket

import pytest

from stillhouse.actors.sandbox.isolation import Isolation
from stillhouse.actors.sandbox.sandbox import Ran, Sandbox
from stillhouse.actors.sandbox.supervise import Kept
from tests.actors.sandbox.conftest import ISOLATIONS, needs_bubblewrap
from tests.actors.sandbox.test_sandbox import LIMITS, inside, python

SIGNALS = """
import os, signal
for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
    os.kill(1, number)
import fcntl
end, begin = os.pipe()
fcntl.fcntl(end, 10, signal.SIGSTOP)  # F_SETSIG: a signal when the pipe can be read
fcntl.fcntl(end, fcntl.F_SETOWN, 1)
fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC)
os.write(begin, b"x")
"""


@needs_bubblewrap
def test_no_program_stops_its_supervisor() -> None:
    async def play(sandbox: Sandbox) -> list[Ran]:
        await sandbox.bash("touch file")
        return [await sandbox.python(SIGNALS), await sandbox.bash("ls")]

    signals, after = inside(play)
    assert (signals.ended, signals.code, after.stdout) == ("exit", 0, "file\n"), signals


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_name_that_is_no_text_does_not_end_the_supervisor(isolation: Isolation) -> None:
    source = "import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([255, 254, 41]), 0, 0, 0); time.sleep(0.1); 'done'"
    assert python(source, isolation).stdout == "'done'\n"


ASK = """
import ctypes, mmap, os, resource, socket
def ask(what):
    try:
        what()
        print("DONE")
    except OSError as error:
        print(error.errno)
ask(lambda: mmap.mmap(-1, 4096))
ask(lambda: open("/dev/zero"))
ask(lambda: mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000))
ask(lambda: mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(21))
ask(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)))
ask(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
ask(lambda: os.sched_setaffinity(1, {0}))
ask(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
for family, kind in ((40, socket.SOCK_STREAM), (socket.AF_NETLINK, socket.SOCK_RAW), (38, socket.SOCK_SEQPACKET)):
    ask(lambda: socket.socket(family, kind))
"""


@needs_bubblewrap
def test_what_is_charged_to_nobody_or_shared_with_the_machine_is_refused() -> None:
    assert python(ASK).stdout.split() == ["1", "2", *["1"] * 9]


@needs_bubblewrap
def test_what_programs_need_is_not_refused() -> None:
    source = """
import mmap, multiprocessing, os, resource, socket
work = multiprocessing.get_context("fork")
with work.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]), work.Value("i", 3).value)
one, other = socket.socketpair()
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
file = open("file", "wb+")
file.truncate(4096)
print(len(mmap.mmap(file.fileno(), 0)), len(os.urandom(4)), open("/dev/null").read() == "")
"""
    assert python(source).stdout == "[1, 2] 3\n4096 4 True\n"


WRITES = """
import os
mine = {"/proc/self", "/proc/thread-self", f"/proc/{os.getpid()}", "/proc/1"}
found = []
for folder, folders, files in os.walk("/proc"):
    folders[:] = [name for name in folders if f"{folder}/{name}" not in mine]
    for name in files:
        try:
            os.close(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_NONBLOCK))
            found.append(f"{folder}/{name}")
        except OSError:
            pass
found
"""


@needs_bubblewrap
def test_nothing_of_proc_can_be_written() -> None:
    assert python(WRITES).stdout == "[]\n"


REAPED_BY_NOBODY = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(12):
    if os.fork() == 0:
        while time.process_time() < 0.25: pass
        os._exit(0)
    try:
        os.wait()
    except OSError:
        pass
"""


@needs_bubblewrap
def test_computing_of_processes_that_nobody_waits_for_is_counted() -> None:
    ran = python(REAPED_BY_NOBODY, limits=LIMITS._replace(time_limit_s=0.8))
    assert ran.ended == "time" and ran.cpu_s >= 0.7


def test_an_output_of_which_nothing_is_kept_takes_no_memory() -> None:
    kept = Kept(1)
    for _ in range(3):
        kept.add(b"abc")
    assert (kept.omitted, kept.text()) == (9, "\n[9 bytes left out]\n")


def test_virtual_sockets_are_none_of_the_families_that_are_allowed() -> None:
    from stillhouse.actors.sandbox.syscalls import ARGUMENTS

    assert set(ARGUMENTS["socket"].values) == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
