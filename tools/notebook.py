"""Runs from a notebook or a script: start, watch, stop, evaluate, and open what was recorded.

    from stillhouse import Run

    run = Run(steps=20, student="builtin", record=True).start()
    for row in run.watch():
        print(row["step"], row.get("train/reverse_kl"))
    run.rollouts().to_pandas()

The run is a launcher in a process of its own, as on the command line. It ends in order with the process that started
it, also if that is killed (launch.kept_run).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

import msgspec
import psutil

from stillhouse.launch.config.run import ALIASES
from stillhouse.launch.errors import WRONG_CONFIG_EXIT_CODE, ConfigError, LaunchError
from stillhouse.launch.processes.local import python_path
from stillhouse.launch.runfolder import RUNS, RunState, choose_path, read_record

if TYPE_CHECKING:
    from datasets import Dataset

    from stillhouse.launch.report.summary import Summary

RECORD_FILE: Final = "batches.record"
LOOK_S: Final = 0.2
"""Time between two looks at the run folder."""
TAIL_BYTES: Final = 4000
"""End of the launcher's output that an error shows."""


class RunFailed(LaunchError):
    """The run failed, or could not be started; the message says why, with the end of what the launcher printed."""


class Run:
    """One run and its folder."""

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        /,
        *,
        run_dir: str | Path | None = None,
        name: str = "",
        resume: bool = False,
        config: str | Path | None = None,
        **keys: Any,
    ) -> None:
        """`settings` and `keys` are those of the command line, by their names or short names: `{"learner.lr": 1e-3}`,
        nested dicts, or `steps=20, max_staleness=2`. `record=True` records the batches in the run folder, for
        `rollouts`. `config`: a TOML or YAML file beneath them. `run_dir`, `name` and `resume` are as on the command
        line. Nothing is started. Raises LaunchError if there is nothing to resume."""
        self.path = choose_path(Path(run_dir).expanduser() if run_dir else None, resume=resume, name=name)
        """The run folder."""
        flags = flags_of({**(settings or {}), **keys})
        if flags.get("learner.record") == "true":
            flags["learner.record"] = str(self.path / RECORD_FILE)
        self._arguments = [f"--run-dir={self.path}", *(["--resume"] if resume else [])]
        self._arguments += [f"--config={Path(config).expanduser()}"] if config is not None else []
        self._arguments += [f"--{key}={text}" for key, text in flags.items()]
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline_fd = -1
        self._output_fd, name = tempfile.mkstemp()
        Path(name).unlink()
        weakref.finalize(self, os.close, self._output_fd)
        metrics = self._metrics_file
        self._rows_from = metrics.stat().st_size if metrics.exists() else 0

    @classmethod
    def open(cls, run: str | Path = "latest") -> Self:
        """A run that is there, by its folder or its name in runs/: to read its metrics and rollouts, or to evaluate it.
        Raises LaunchError if there is none."""
        path = Path(run).expanduser()
        path = path if (path / "run.json").is_file() else RUNS / path
        if not (path / "run.json").is_file():
            raise LaunchError(f"{run} is no run: got a folder without run.json, expected the folder of a run")
        opened = cls(run_dir=path.resolve())
        opened._rows_from = 0
        return opened

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state})"

    # ------------------------------------------------------------------------------------------------- its life

    def start(self, timeout_s: float = 600.0) -> Self:
        """Start the run; returns when its folder is there, which is after the configuration, models and prompts were
        checked. Raises RunFailed with what is wrong with them."""
        if self._process is not None:
            raise LaunchError(f"{self.path} was started already; make another Run, or one with resume=True")
        reading_fd, self._lifeline_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stillhouse.tools.kept_run", str(reading_fd), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output_fd,
                stderr=subprocess.STDOUT,
                pass_fds=(reading_fd,),
                # An interrupted cell sends SIGINT to all processes of the kernel's group.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        finally:
            os.close(reading_fd)
        deadline_s = time.monotonic() + timeout_s
        while self._process.poll() is None and not self._launched(self._process.pid):
            if time.monotonic() > deadline_s:
                self.stop(at_once=True)
                raise RunFailed(f"the run did not start within {timeout_s:.0f} s:\n{self.output(TAIL_BYTES)}")
            time.sleep(LOOK_S)
        if self._process.poll() not in (None, 0):
            self._raise(self._process.returncode)
        return self

    def stop(self, *, at_once: bool = False, timeout_s: float = 600.0) -> Summary | None:
        """End the run in order, as Ctrl-C does: the learner finishes its step and writes a checkpoint. `at_once`:
        without one. Returns the summary, None if the run was ended before it had a folder. Raises RunFailed if it takes
        longer than `timeout_s`; it is then killed."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            if at_once:
                time.sleep(LOOK_S)  # two signals at the same time would count as one
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()  # its processes end with it (launch.processes.lifeline)
                process.wait()
                raise RunFailed(f"{self.path} did not stop within {timeout_s:.0f} s and was killed") from None
        self._let_go()
        return self._summary()

    def wait(self, timeout_s: float | None = None) -> Summary:
        """Wait for the end of the run. Raises RunFailed if it failed, TimeoutError after `timeout_s`."""
        if self._process is not None:
            try:
                code = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.path} still runs after {timeout_s} s") from None
            self._let_go()
            if code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
                self._raise(code)
        summary = self._summary()
        if summary is None:
            raise LaunchError(f"{self.path} has no summary.json: the run is not over, or was killed")
        return summary

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------------- what it does

    @property
    def running(self) -> bool:
        """Whether the launcher that this object started runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def state(self) -> RunState | Literal["not started", "killed"]:
        """What run.json says; `killed`: it says that a run goes on, of which this object sees no launcher."""
        record = read_record(self.path)
        if record is None:
            return "not started"
        alive = self.running or psutil.pid_exists(record.launcher_pid)
        return "killed" if record.state == "running" and not alive else record.state

    def watch(self, *, every_s: float = 1.0) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl as they are written, from the first one of this launch until the run is over: an
        optimizer step or an evaluation each (`kind`), by tag (docs/metrics.md). Raises RunFailed if the run fails.
        Leaving the loop does not stop the run."""
        at = self._rows_from
        while True:
            over = not self.running
            at, rows = _rows(self._metrics_file, at)
            yield from (row for row in rows if row["kind"] != "resume")
            if over:
                break
            deadline_s = time.monotonic() + every_s
            while self.running and time.monotonic() < deadline_s:
                time.sleep(LOOK_S)
        if self._process is not None:
            self.wait()

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl on the branch of weights that was kept, over all launches of the run."""
        from stillhouse.learner.reports.metrics import read_metrics  # imports torch

        return read_metrics(self.path) if self._metrics_file.exists() else []

    def output(self, last_bytes: int = 0) -> str:
        """What the launcher printed, or the end of it."""
        size = os.fstat(self._output_fd).st_size
        start = max(0, size - last_bytes) if last_bytes else 0
        return os.pread(self._output_fd, size - start, start).decode(errors="replace")

    def evaluate(
        self, settings: Mapping[str, Any] | None = None, /, *, checkpoint: str | Path | None = None, **keys: Any
    ) -> dict[str, Any]:
        """Let a checkpoint answer the run's evaluation prompts, in a process of its own; the newest one by default.
        `settings` and `keys` change the run's configuration, for example
        `{"learner.tasks.eval_prompts": "hard.jsonl"}`. Returns figures by the names of docs/metrics.md, without
        `eval/`. Raises LaunchError without a checkpoint, RunFailed with what went wrong."""
        from stillhouse.tools.checkpoint_accuracy import evaluate_checkpoint

        return evaluate_checkpoint(self.path, checkpoint, flags_of({**(settings or {}), **keys}))

    def rollouts(self) -> Dataset:
        """The recorded rollouts as a table of `datasets`, also while the run goes on (docs/notebook.md lists the
        columns). Raises LaunchError if the run is not recorded (`record=True`), RecordError if nothing is yet."""
        from stillhouse.tools.rollout_rows import rollout_rows

        try:
            from datasets import Dataset
        except ImportError as error:
            raise LaunchError(f"a table of rollouts needs the package {error.name}: pip install -e '.[data]'") from None
        return Dataset.from_list(list(rollout_rows(self.path)))

    # ------------------------------------------------------------------------------------------------- inside

    @property
    def _metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def _launched(self, pid: int) -> bool:
        record = read_record(self.path)
        return record is not None and record.launcher_pid == pid

    def _summary(self) -> Summary | None:
        from stillhouse.launch.report.summary import Summary

        file = self.path / "summary.json"
        return msgspec.json.decode(file.read_bytes(), type=Summary) if file.is_file() else None

    def _let_go(self) -> None:
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1

    def _raise(self, code: int) -> None:
        """Raise the error of a launcher that ended with this code."""
        self._let_go()
        said = self.output(TAIL_BYTES).strip()
        if code == WRONG_CONFIG_EXIT_CODE:
            wrong = [line.removeprefix("stillhouse: ") for line in said.splitlines() if line.startswith("stillhouse: ")]
            raise RunFailed("\n".join(wrong) or said)
        summary = self._summary()
        reason = summary.reason if summary is not None else f"the launcher ended with code {code}"
        raise RunFailed(f"{reason}\n--- the launcher's last words; logs are in {self.path / 'logs'}\n{said}")


def flags_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The flags of the command line, without `--`, for keys with values; nested dicts are joined by dots. Raises
    ConfigError for a key that is given twice."""
    flags: dict[str, str] = {}
    for key, value in _flat(settings):
        key = ALIASES.get(key.replace("-", "_"), key)
        if key in flags:
            raise ConfigError(f"{key}: got two values, expected one (a short name and the key itself are the same)")
        flags[key] = value if isinstance(value, str) else "none" if value is None else _text(value)
    return flags


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(cast(Mapping[str, Any], value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _text(value: Any) -> str:
    return str(value) if isinstance(value, Path) else json.dumps(value)


def _rows(file: Path, at: int) -> tuple[int, list[dict[str, Any]]]:
    """The whole lines from byte `at` on, and where the next one begins."""
    if not file.exists():
        return at, []
    with file.open("rb") as stream:
        stream.seek(min(at, stream.seek(0, os.SEEK_END)))
        at, data = stream.tell(), stream.read()
    whole = data[: data.rfind(b"\n") + 1]
    return at + len(whole), [json.loads(line) for line in whole.splitlines()]
