"""The worker processes: which function each role runs, and what surrounds it in its process.

    python -m stillhouse.launch.workers.roles RUN_DIR [LAUNCHER_PID]

is the command by which a backend (launch.processes.backend) starts a worker, on any machine that sees the run folder;
RUN_DIR is its path there. Stdin carries one line, a StartRole in JSON, and then stays open: its end means that the
launcher is gone, and the worker ends at once. With LAUNCHER_PID, its parent, the worker also dies when that process
does. launch.processes.forkserver does the same in a fork.

A role's main is `(ctx: RoleContext[...]) -> int`. Around it: output goes to the role's own log, SIGINT is ignored (the
launcher handles Ctrl-C), SIGTERM becomes SystemExit in the main thread, SIGUSR1 dumps all stacks, and
launch.processes.lifeline ends the process with its launcher. No torch is imported here, so the buffer and workers on
servers never load it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.processes.lifeline import watch_launcher
from stillhouse.launch.workers.main_process import outcome_of, prepare
from stillhouse.launch.workers.start_role import THREAD_VARIABLES, StartRole, WorkFolder
from stillhouse.learner.checkpoints.files import CHECKPOINTS, TRAINER, latest
from stillhouse.models.description import known_vocabulary_size
from stillhouse.protocol.children import die_with_parent
from stillhouse.protocol.context import ExitCode, RoleContext, WorkerRole
from stillhouse.protocol.messages import Ledger, WeightVersion
from stillhouse.tracing import events

ENTRIES: Final[dict[WorkerRole, str]] = {
    "buffer": "stillhouse.launch.workers.roles:run_buffer",
    "learner": "stillhouse.learner.worker:main",
    "actor": "stillhouse.actors.worker:main",
    "teacher": "stillhouse.teachers.worker:main",
}
"""Role -> `module:function` of its main."""
RANKS_ENTRY: Final = "stillhouse.launch.workers.ranks:main"
"""That of a learner of several ranks."""
JOINED_RANKS_ENTRY: Final = "stillhouse.launch.workers.ranks:join"
"""That of its ranks on a host that joins."""


def entries_of(config: RunConfig) -> dict[WorkerRole, str]:
    """ENTRIES for this run."""
    entries = dict(ENTRIES)
    if config.learner.ranks > 1:
        entries["learner"] = RANKS_ENTRY
    return entries


log = logging.getLogger("stillhouse.launch.workers.roles")  # also when run by -m


def redirect_output(log_path: Path) -> None:
    """Append stdout and stderr to the log, by descriptor so that native libraries follow; stdin reads nothing."""
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null_fd), (1, log_fd), (2, log_fd)):
        os.dup2(source, target)
    os.close(log_fd)
    os.close(null_fd)


def use_threads(threads: int) -> None:
    """Set the native threads of this process and of those that it starts, ranks of a learner for example."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    if (torch := sys.modules.get("torch")) is not None:  # a fork: torch read the variables before
        torch.set_num_threads(threads)


def run_role(start: StartRole, config: RunConfig, run_dir: Path, lifeline_fd: int) -> NoReturn:
    """Run the role's main and end this process with its exit code. End-of-file on `lifeline_fd` means that the launcher
    is gone.

    The process ends by os._exit, so that neither the fork server's exit handlers nor a hanging thread can delay it.
    Mains close what they opened."""
    code = int(ExitCode.FAILED)
    try:
        watch_launcher(lifeline_fd)
        use_threads(start.threads)
        prepare(start.name)
        if config.launch.trace and start.entry not in (RANKS_ENTRY, JOINED_RANKS_ENTRY):  # rank 0 is elsewhere
            events.begin(run_dir / events.FOLDER, role=start.role, worker=start.name, incarnation=start.incarnation)

        def run() -> int:
            log.info("%s (%s) starts, pid %d", start.name, start.incarnation, os.getpid())
            return _load_entry(start.entry)(start.context(config, run_dir))

        code = outcome_of(start.name, run)
        events.end()
    finally:
        os._exit(int(code))


def _load_entry(entry: str) -> Callable[[RoleContext[RunConfig]], int]:
    module_name, _, function_name = entry.partition(":")
    function: Callable[[RoleContext[RunConfig]], int] = getattr(importlib.import_module(module_name), function_name)
    return function


class _Carried(msgspec.Struct, frozen=True):
    """The part of a checkpoint's trainer.json that the buffer resumes from."""

    version: WeightVersion
    ledger: Ledger | None


def run_buffer(ctx: RoleContext[RunConfig]) -> int:
    """Main of the buffer. On resume it gets the version and ledger of the checkpoint that the learner resumes from."""
    from stillhouse.buffer.server import main as buffer_main

    carried = _Carried(WeightVersion(0, 0), None)
    if ctx.resume:
        checkpoint = latest(ctx.run_dir / CHECKPOINTS).path
        if checkpoint is not None:
            carried = msgspec.json.decode((checkpoint / TRAINER).read_bytes(), type=_Carried)
    return buffer_main(
        config=ctx.config.buffer,
        run_id=ctx.run_id,
        run_dir=ctx.run_dir,
        incarnation=ctx.incarnation,
        version=carried.version,
        carried=carried.ledger,
        vocab_fingerprint=_vocab_fingerprint(ctx.config.models.student),
        vocab_size=known_vocabulary_size(ctx.config.models.student),
    )


def _vocab_fingerprint(model: str) -> str | None:
    """Fingerprint of the student's vocabulary; None when only transformers can read its tokenizer, in which case the
    learner reports it."""
    from stillhouse.models.files import TokenizerError
    from stillhouse.models.tokenizer_file import FileTokenizer

    try:
        return FileTokenizer(model).fingerprint
    except TokenizerError as error:
        log.info("the learner will report the run's vocabulary: %s", error)
        return None


def _read_start() -> tuple[StartRole, int]:
    """Read the first line of stdin; returns it and a descriptor for the rest."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            raise EOFError(f"stdin ended after {line!r}; expected a StartRole in JSON and a newline")
        line += byte
    return msgspec.json.decode(line, type=StartRole), os.dup(0)


def main() -> NoReturn:
    """Entry of a worker that was started by a command."""
    try:
        folder = WorkFolder(Path(sys.argv[1]))
        start, lifeline_fd = _read_start()
        redirect_output(folder.log_path(start.name))
        if len(sys.argv) > 2:
            die_with_parent(int(sys.argv[2]))
        config = read_config(folder.config_path)
    except BaseException:
        traceback.print_exc()
        os._exit(ExitCode.FAILED)
    run_role(start, config, folder.path, lifeline_fd)


if __name__ == "__main__":
    main()
