"""Programs that mean harm, in sandboxes. What they did is looked for from outside, with /proc, sockets and files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import pytest

from stillhouse.actors.sandbox.isolation import Isolation, Limits, prefixes
from stillhouse.actors.sandbox.sandbox import Ran, Sandbox, SandboxFailed, make_sandbox
from tests.actors.sandbox.conftest import ISOLATIONS, needs_bubblewrap
from tests.patience import Limit

Value = TypeVar("Value")
LIMITS = Limits(time_limit_s=2.0, memory_mb=200, disk_mb=8, max_processes=16)


def inside(
    play: Callable[[Sandbox], Awaitable[Value]], isolation: Isolation = "bubblewrap", limits: Limits = LIMITS
) -> Value:
    async def run() -> Value:
        async with Sandbox(isolation, limits) as sandbox:
            return await play(sandbox)

    return asyncio.run(run())


def python(source: str, isolation: Isolation = "bubblewrap", limits: Limits = LIMITS) -> Ran:
    return inside(lambda sandbox: sandbox.python(source, merge=True), isolation, limits)


def with_word(word: str) -> list[int]:
    """Processes of this machine with a word in their command line, but this one."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and word in (process / "cmdline").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def wait_for(condition: Callable[[], bool]) -> None:
    limit = Limit()
    while not condition():
        assert not limit.passed
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ what programs may do


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_python_and_bash_run_and_files_stay_from_call_to_call(isolation: Isolation) -> None:
    async def play(sandbox: Sandbox) -> list[Ran]:
        return [
            await sandbox.python("text = 'kept'\nopen('file', 'w').write(text)"),
            await sandbox.bash("cat file; read line; echo $line >&2; exit 3", "said"),
            await sandbox.python("text"),
            await sandbox.python("1 / 0"),
            await sandbox.python("print("),
            await sandbox.python("import sys; sys.exit(5)"),
            await sandbox.python("import sys; sum(map(int, sys.stdin))", "1\n2"),
            await sandbox.python("'no last value'; None"),
            await sandbox.python(
                "late = open('late', 'w'); late.write('flushed'); import atexit; atexit.register(print, 'bye')"
            ),
            await sandbox.python("open('late').read(), __name__, __import__('sys').argv"),
            await sandbox.python("x = 1\nx", cell=False),
            await sandbox.python("raise KeyboardInterrupt"),
        ]

    written, read, forgotten, division, syntax, ended, summed, none, _, late, program, stopped = inside(play, isolation)
    assert (written.ended, written.code, written.stdout) == ("exit", 0, "4\n")
    assert (read.code, read.stdout, read.stderr) == (3, "kept", "said\n")
    assert forgotten.code == 1 and "NameError: name 'text' is not defined" in forgotten.stderr
    assert 'File "call.py", line 1' in division.stderr and "run_python" not in division.stderr
    assert division.stderr.endswith("ZeroDivisionError: division by zero\n") and "1 / 0" in division.stderr
    assert syntax.code == 1 and "SyntaxError" in syntax.stderr and "run_python" not in syntax.stderr
    assert (ended.ended, ended.code) == ("exit", 5)
    assert summed.stdout == "3\n"
    assert (none.code, none.stdout) == (0, "")
    assert late.stdout == "('flushed', '__main__', ['call.py'])\n"
    assert (program.code, program.stdout) == (0, "")
    assert stopped.code != 0 and stopped.stderr.endswith("KeyboardInterrupt\n") and "supervise" not in stopped.stderr


def test_long_outputs_keep_their_ends_and_count_the_rest() -> None:
    source = "import sys; sys.stdout.write('a' * 500_000 + 'b' * 500_000)"
    ran = inside(lambda sandbox: sandbox.python(source + "; None", most=1000), "none")
    first, gap, last = ran.stdout.split("\n")
    assert (first, gap, last) == ("a" * 500, "[999000 bytes left out]", "b" * 500)
    assert ran.omitted == 999_000


def test_input_that_nobody_reads_and_large_input_and_half_characters() -> None:
    async def play(sandbox: Sandbox) -> list[Ran]:
        return [
            await sandbox.python("'done'", "x" * 1_000_000),
            await sandbox.python("import sys; len(sys.stdin.read())", "x" * 1_000_000),
            await sandbox.python("ascii('\ud800')"),
            await sandbox.python("import sys; sys.stdout.buffer.write(bytes(range(256)) * 3); None"),
        ]

    unread, read, half, raw = inside(play, "none")
    assert (unread.stdout, read.stdout) == ("'done'\n", "1000000\n")
    assert half.stdout == "\"'?'\"\n"
    assert raw.stdout.count("A") == 3
    with pytest.raises(ValueError, match="1048577 characters, expected at most 1048576"):
        inside(lambda sandbox: sandbox.python("#" * (2**20 + 1)), "none")


def test_many_sandboxes_in_many_threads_do_not_mix() -> None:
    said: dict[int, list[str]] = {}

    def one(number: int) -> None:
        async def play(sandbox: Sandbox) -> list[str]:
            await sandbox.bash(f"echo {number} > mine")
            return [(await sandbox.bash("cat mine")).stdout for _ in range(2)]

        said[number] = inside(play, "none")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {number: [f"{number}\n"] * 2 for number in range(4)}


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("import os\nfor _ in range(3): os.fork()\nwhile True: pass", "time"),
        ("data = [bytearray(b'x' * 20_000_000) for _ in range(50)]", "memory"),
        (
            "import os, time\nfor _ in range(3): os.fork()\ndata = bytearray(b'x' * 50_000_000); time.sleep(60)",
            "memory",
        ),
        (
            "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(60,)).start()",
            "processes",
        ),
    ],
)
def test_what_is_used_together_is_limited(isolation: Isolation, source: str, ended: str) -> None:
    ran = python(source, isolation, LIMITS._replace(time_limit_s=0.5))
    assert (ran.ended, ran.code) == (ended, None)


@needs_bubblewrap
def test_processes_that_make_processes_are_ended() -> None:
    word = f"word{uuid.uuid4().hex}"

    async def play(sandbox: Sandbox) -> tuple[Ran, Ran]:
        bomb = f"""bomb() {{ bomb {word} | bomb {word} & }}; bomb; sleep 60"""
        return await sandbox.bash(bomb), await sandbox.python("'still here'")

    bomb, after = inside(play)
    assert bomb.ended == "processes"
    assert after.stdout == "'still here'\n"


@needs_bubblewrap
def test_disk_and_number_of_files_are_limited() -> None:
    async def play(sandbox: Sandbox) -> list[Ran]:
        fill = "import os\nfor i in range(100): open(f'{FOLDER}/f{i}', 'wb').write(bytes(1_000_000))"
        return [
            await sandbox.python(fill.replace("{FOLDER}", "/work")),
            await sandbox.python(fill.replace("{FOLDER}", "/dev/shm")),
            await sandbox.python("open('/usr/new', 'w')"),
            await sandbox.python("open('/new', 'w')"),
            await sandbox.python("'still here'"),
            await sandbox.python("for i in range(10**6): open(f'/tmp/n{i}', 'w')"),
            await sandbox.python("import os; len(os.listdir('/tmp'))"),
        ]

    full, shared, usr, root, after, many, again = inside(play)
    assert "No space left on device" in full.stderr and "No space left on device" in shared.stderr
    assert "Read-only file system" in usr.stderr and "Read-only file system" in root.stderr
    assert after.stdout == "'still here'\n"
    assert many.ended == "files"
    assert again.stdout == "0\n"


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_program_that_only_waits_is_ended_too(isolation: Isolation) -> None:
    assert python("import time; time.sleep(600)", isolation).ended == "waited"


# ---------------------------------------------------------------------------------------------- what must not get out


@pytest.fixture
def listening() -> Iterator[tuple[int, str]]:
    """Ports of this machine: TCP on loopback, and an abstract Unix socket."""
    name = f"stillhouse-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        yield tcp.getsockname()[1], name


CONNECT = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, "\\0NAME")):
    with socket.socket(family) as one:
        one.settimeout(2)
        print(one.connect_ex(address))
"""


@needs_bubblewrap
def test_there_is_no_network(listening: tuple[int, str]) -> None:
    source = CONNECT.replace("PORT", str(listening[0])).replace("NAME", listening[1])
    seen_from_here = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    assert seen_from_here == "0\n0\n"
    ran = python(source)
    assert ran.code == 0 and all(int(line) != 0 for line in ran.stdout.split()), ran


@needs_bubblewrap
def test_files_and_keys_of_the_host_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = f"secret{uuid.uuid4().hex}"
    monkeypatch.setenv("A_KEY", secret)
    (tmp_path / "file").write_text(secret)
    source = f"""
import glob, os
paths = {str(tmp_path / "file")!r}, {str(Path(__file__))!r}, "/etc/shadow", "/root/.ssh", "/home", "/sys"
found = [path for path in paths if os.path.exists(path)]
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        if {secret[:12]!r} + {secret[12:]!r} in open(path).read():
            found.append(path)
    except OSError:
        pass
found + sorted(set(os.environ) - {{"PATH", "HOME", "TMPDIR", "LANG", "PWD"}})
"""
    ran = python(source)
    expected = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"]
    assert ran.stdout == f"{expected}\n"


@needs_bubblewrap
def test_the_kernel_is_closed() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print(name, result if result < 0 else "DONE", ctypes.get_errno())
call("memfd_create", b"x", 0)
call("shmget", 0, 4096, 0o1600)
call("semget", 0, 1, 0o1600)
call("msgget", 0, 0o1600)
call("ptrace", 16, 2, 0, 0)
call("unshare", 0x10000000)
call("mount", b"none", b"/work", b"tmpfs", 0, 0)
call("umount2", b"/proc/sys", 2)
call("setns", 0, 0)
for number in NUMBERS:
    call("syscall", number, 0, 0, 0, 0)
"""
    numbers = (321, 425, 323, 298, 250) if os.uname().machine == "x86_64" else (280, 425, 282, 241, 219)
    ran = python(source.replace("NUMBERS", repr(numbers)))
    lines = ran.stdout.splitlines()
    assert len(lines) == 9 + len(numbers)
    assert all(line.endswith(" -1 1") for line in lines), ran.stdout


@needs_bubblewrap
def test_what_of_proc_belongs_to_the_machine_is_closed() -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8")
    source = """
import os
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        print(path)
    except OSError:
        pass
for path in ("/proc/kcore", "/proc/keys", "/proc/iomem", "/proc/1/mem", "/proc/1/environ", "/proc/1/fd/1"):
    try:
        os.close(os.open(path, os.O_RDONLY))
        print(path)
    except OSError:
        pass
"""
    ran = python(source)
    assert (ran.code, ran.stdout) == (0, "")
    assert Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8") == before


LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sh", ["sh", "-c", "trap '' TERM HUP; while :; do sleep 0.1; done", "WORD"])
    os._exit(0)
time.sleep(0.3)
"""


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_nothing_goes_on_after_a_call(isolation: Isolation) -> None:
    word = f"word{uuid.uuid4().hex}"

    async def play(sandbox: Sandbox) -> list[list[int]]:
        assert (await sandbox.python(LEAVES.replace("WORD", word))).ended == "exit"
        return [with_word(word)]

    assert inside(play, isolation) == [[]]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_nothing_goes_on_after_the_actor_was_killed(isolation: Isolation, tmp_path: Path) -> None:
    word = f"word{uuid.uuid4().hex}"
    source = f"""
import asyncio
from stillhouse.actors.sandbox.sandbox import Sandbox
from stillhouse.actors.sandbox.isolation import Limits
async def main():
    async with Sandbox({isolation!r}, Limits(time_limit_s=60.0)) as sandbox:
        await sandbox.bash("exec sh -c 'trap : TERM; while :; do sleep 0.1; done' {word}")
asyncio.run(main())
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", source], cwd=Path(__file__).parents[3], env=env) as actor:
        try:
            wait_for(
                lambda: any(
                    f"\0{word}\0" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") for pid in with_word(word)
                )
            )
            assert len(list(tmp_path.iterdir())) == (isolation == "none")
        finally:
            os.kill(actor.pid, signal.SIGKILL)
    wait_for(lambda: not with_word(word) and not list(tmp_path.iterdir()))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_nothing_is_left_of_a_call_that_is_cancelled_at_any_moment(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once and again: while the sandbox begins, in the call, and while that is being ended."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    word = f"word{uuid.uuid4().hex}"
    limits = LIMITS._replace(memory_mb=201)  # to tell its supervisors from those of other tests

    async def cancelled(after_s: float, again_s: float) -> None:
        async with Sandbox(isolation, limits) as sandbox:
            call = asyncio.create_task(sandbox.bash(f"exec sh -c 'while :; do sleep 0.1; done' {word}"))
            for pause_s in (after_s, again_s):
                await asyncio.sleep(pause_s)
                call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call

    async def all_of_them() -> int:
        await cancelled(0.3, 0.0)  # what the event loop opens for its first process stays open
        before = len(list(Path("/proc/self/fd").iterdir()))
        for after_s, again_s in zip((0.0, 0.002, 0.005, 0.01, 0.03, 0.1, 0.2), cycle((0.0, 0.003)), strict=False):
            await cancelled(after_s, again_s)
        return len(list(Path("/proc/self/fd").iterdir())) - before

    assert asyncio.run(all_of_them()) == 0
    assert not with_word(word) and not with_word('"memory_mb": 201')
    assert not list(tmp_path.iterdir())


@needs_bubblewrap
def test_a_program_whose_sandbox_ends_is_told_and_gets_a_new_one() -> None:
    word = f"word{uuid.uuid4().hex}"

    async def play(sandbox: Sandbox) -> tuple[Ran, Ran]:
        await sandbox.bash("touch file")
        running = asyncio.create_task(sandbox.bash(f"exec sh -c 'while :; do sleep 0.1; done' {word}"))
        await asyncio.to_thread(wait_for, lambda: bool(with_word(word)))
        (program,) = with_word(word)
        stat = Path(f"/proc/{program}/stat").read_text(encoding="utf-8")
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # as a machine without memory does
        return await running, await sandbox.bash("ls; echo new")

    end, after = inside(play)
    assert (end.ended, end.code) == ("lost", None)
    assert after.stdout == "new\n"


def test_the_answer_of_a_call_that_was_given_up_is_not_taken_for_another_s() -> None:
    async def play(sandbox: Sandbox) -> Ran:
        slow = asyncio.create_task(sandbox.bash("sleep 0.5; echo slow"))
        await asyncio.sleep(0.2)
        slow.cancel()
        return await sandbox.bash("echo quick")

    assert inside(play, "none").stdout == "quick\n"


# -------------------------------------------------------------------------------------------------- what cannot begin


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="isolation: got 'docker', expected one of bubblewrap, none"):
        make_sandbox("docker", "")
    with pytest.raises(ValueError, match=r"memory_mb: got 0\.5, expected a whole number above 0"):
        make_sandbox("none", "", memory_mb=0.5)
    with pytest.raises(ValueError, match="time_limit_s: got 0, expected a number above 0"):
        make_sandbox("none", "", time_limit_s=0)
    with pytest.raises(ValueError, match="there is no program '/nothing'"):
        make_sandbox("none", "/nothing")
    with pytest.raises(ValueError, match="expected the absolute path"):
        make_sandbox("none", "python3")


def test_without_bubblewrap_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"there is no bwrap here\. Install bubblewrap .*or set isolation = 'none'"):
        make_sandbox("bubblewrap", "", memory_mb=123)


def test_a_bubblewrap_that_cannot_isolate_is_refused_with_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ValueError, match="does not work here: the sandbox cannot begin: bwrap: No permissions"):
        make_sandbox("bubblewrap", "", memory_mb=124)
    with pytest.raises(SandboxFailed, match="No permissions to create new namespace"):
        python("1")


def test_an_interpreter_whose_folder_holds_a_home_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho {Path.home()}\necho {Path.home()}\n")
    fake.chmod(0o755)
    with pytest.raises(ValueError, match="all of that folder would be visible"):
        prefixes(str(fake))
