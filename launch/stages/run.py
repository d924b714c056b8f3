"""Runs the stages of a file in order, each by commands that a user could type, and writes one summary.json for all."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.launch.checks.preflight import with_folders
from stillhouse.launch.config.command_line import CommandLine
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.machine.machine import pretended_machine
from stillhouse.launch.report.figures import plural
from stillhouse.launch.runfolder import RUNS, RunFolder, choose_path, end_state
from stillhouse.launch.stages.check import check_stages, training, writing
from stillhouse.launch.stages.child import run_child
from stillhouse.launch.stages.config import TEACHER, Stage, has_stages, read_stages
from stillhouse.launch.stages.state import FOLDER, STATE, ChainState, StageState, read_state
from stillhouse.launch.terminal import StopRequests
from stillhouse.learner.checkpoints.files import CHECKPOINTS, MANIFEST, latest
from stillhouse.learner.config import ADAPTER_CONFIG
from stillhouse.protocol.atomic_file import write_atomic

ACCOUNTS: Final = ("summary.json", "replay.json")
"""Accounts of a run, and of a replay."""


def is_staged(line: CommandLine) -> bool:
    """Whether the command line starts stages, or goes on with some."""
    return has_stages(line) or (line.resume and (_former_folder(line) / STATE).is_file())


def run_stages(line: CommandLine) -> int:
    """Check all stages, and run them. Returns the exit code. Raises LaunchError."""
    former = read_state(_former_folder(line)) if line.resume else None
    if line.resume and former is None and (_former_folder(line) / "config.yaml").exists():
        raise ConfigError(f"--resume: {_former_folder(line)} is a run without stages; expected a file without them")
    stages = read_stages(line, former.stages if former is not None else ())
    path = choose_path(line.run_dir, resume=line.resume, name=line.name)
    state = _state(stages, former)
    left = [n for n, one in enumerate(state.stages) if not one.done]
    pretended = pretended_machine(line.gpus) if line.gpus else None
    folders = [path / state.stages[n].folder for n in left]
    check_stages([stages[n] for n in left], folders, pretended, whole=line.check)
    if line.check:
        print(f"{plural(len(left), 'stage')}: configuration, models and prompts are fine; nothing was started")
        return 0
    with RunFolder.open(path, resume=line.resume, name=line.name) as folder:
        return Chain(folder, stages, state).run()


def _former_folder(line: CommandLine) -> Path:
    return line.run_dir or RUNS / (line.name or "latest")


def _state(stages: Sequence[Stage], former: ChainState | None) -> ChainState:
    known = {one.name: one for one in former.stages} if former is not None else {}
    found: list[StageState] = []
    for n, stage in enumerate(stages, start=1):
        own = stage.own
        one = StageState(
            name=own.name,
            folder=f"{FOLDER}/{n}-{own.name}",
            text=own.text,
            epochs=own.epochs,
            config=msgspec.to_builtins(stage.config),
            models_from=stage.models_from,
            steps_given=stage.steps_given,
            flags=stage.flags,
        )
        was = known.get(own.name)
        if was is not None and was.begun:
            one = msgspec.structs.replace(was, config=one.config)
        found.append(one)
    return ChainState(stages=found)


class Chain:
    """The stages of one folder, from the first that is not done."""

    def __init__(self, folder: RunFolder, stages: Sequence[Stage], state: ChainState) -> None:
        self._folder, self._stages, self._state = folder, stages, state
        self._path = folder.path

    def run(self) -> int:
        """Returns the exit code: of the stage that did not end well, if there is one."""
        (self._path / FOLDER).mkdir(exist_ok=True)
        self._state.write(self._path)
        code, began_s = 0, time.monotonic()
        with StopRequests() as stop:
            for n, one in enumerate(self._state.stages):
                if one.done:
                    continue
                print(f"stage {n + 1} of {len(self._stages)}, {one.name}: {self._path / one.folder}", flush=True)
                one_began_s = time.monotonic()
                code = self._stage(n, stop)
                one.wall_s += time.monotonic() - one_began_s
                if code == 0 and not one.done:
                    code = stop.exit_code
                self._state.write(self._path)
                if code != 0:
                    break
        self._folder.finish(code)
        self._summarise(code, time.monotonic() - began_s)
        return code

    def _stage(self, n: int, stop: StopRequests) -> int:
        """Run what is left of a stage. Returns the exit code; 0 and not done if the user stopped it between two."""
        one = self._state.stages[n]
        config = self._begin(n)
        for phase in self._phases(one):
            if phase in one.phases:
                continue
            if stop.first is not None:
                return 0
            if code := run_child(self._words(one, phase, config), stop):
                return code
            one.phases.append(phase)
            self._state.write(self._path)
        checkpoint = latest(self._path / one.folder / CHECKPOINTS).path
        if checkpoint is None:
            raise LaunchError(f"stage {one.name} has ended, but {self._path / one.folder} has no intact checkpoint")
        if (checkpoint / ADAPTER_CONFIG).is_file():
            merged = self._path / f"{one.folder}-student"
            if not merged.exists() and (code := run_child(["export", str(checkpoint), "--to", str(merged)], stop)):
                return code
            one.result = merged.relative_to(self._path).as_posix()
        else:
            one.result = checkpoint.relative_to(self._path).as_posix()
        one.checkpoint, one.done = checkpoint.relative_to(self._path).as_posix(), True
        return 0

    def _begin(self, n: int) -> RunConfig:
        """The configuration with the models that earlier stages have made, also as a file."""
        one, earlier = self._state.stages[n], {other.name: other for other in self._state.stages[:n]}
        one.begun = True
        one.models = {key: earlier[name].result for key, name in one.models_from.items()}
        one.sources = {
            key: hashlib.sha256((self._path / earlier[name].checkpoint / MANIFEST).read_bytes()).hexdigest()
            for key, name in one.models_from.items()
        }
        self._state.write(self._path)
        config = with_folders(
            build(RunConfig, one.config), {key: self._path / folder for key, folder in one.models.items()}
        )
        write_config(training(config) if one.text else config, self._beside(one, ".yaml"))
        if one.text:
            write_config(writing(config, one.text), self._beside(one, "-text.yaml"))
        return config

    def _beside(self, one: StageState, suffix: str) -> Path:
        return self._path / f"{one.folder}{suffix}"

    @staticmethod
    def _phases(one: StageState) -> tuple[str, ...]:
        return ("write", "replay") if one.text else ("run",)

    def _words(self, one: StageState, phase: str, config: RunConfig) -> list[str]:
        folder, record = self._path / one.folder, str(self._beside(one, ".record"))
        by = ["--config", str(self._beside(one, ".yaml"))]
        if phase == "run":
            return [*by, "--run-dir", str(folder), *_going_on(folder, "config.yaml")]
        if phase == "replay":
            if going_on := _going_on(folder, "replay_plan.json"):
                return ["replay", record, "--run-dir", str(folder), *going_on]
            order = "shuffled" if one.epochs > 1 else "recorded"
            steps = ["--steps", str(config.steps)] if one.steps_given and one.text != TEACHER else []
            epochs = ["--epochs", str(one.epochs), "--order", order]
            return ["replay", record, *by, "--run-dir", str(folder), *epochs, *steps]
        text, of_text = self._beside(one, "-text"), ["--config", str(self._beside(one, "-text.yaml"))]
        if one.text != TEACHER:
            return ["write", record, "--from", one.text, *of_text]
        return ["write", record, *of_text, "--run-dir", str(text), *_going_on(text, "config.yaml")]

    def _summarise(self, code: int, wall_s: float) -> None:
        """Write summary.json, and print a line for each stage."""
        accounts = [_account(self._path / one.folder) for one in self._state.stages]
        rows = [
            {
                "name": one.name,
                "folder": one.folder,
                "state": "done" if one.done else "begun" if one.begun else "waiting",
                "steps": account.get("steps", 0),
                "reason": account.get("reason", ""),
                "eval": account.get("eval", []),
                "student": one.result,
                "models": one.models,
                "wall_s": one.wall_s,
            }
            for one, account in zip(self._state.stages, accounts, strict=True)
        ]
        whole = {
            "name": self._folder.record.name,
            "ok": code == 0,
            "state": end_state(code),
            "exit_code": code,
            "wall_s": wall_s,
            "stages": rows,
        }
        write_atomic(self._path / "summary.json", msgspec.json.format(msgspec.json.encode(whole), indent=2))
        print()
        for row in rows:
            print(_line(row))
        last = next((one.result for one in reversed(self._state.stages) if one.done), "")
        print(f"student      {self._path / last}" if last else "student      none yet")
        if code:
            print(f"to resume    stillhouse --resume --run-dir {self._path}")
        print(f"run folder   {self._path}")


def _going_on(folder: Path, marker: str) -> list[str]:
    """--resume for a folder in which something has begun. One whose launcher was killed before that is removed."""
    if (folder / "run.json").is_file() and (folder / marker).is_file():
        return ["--resume"]
    if folder.exists() and not (folder / CHECKPOINTS).exists():
        shutil.rmtree(folder)
    return []


def _account(folder: Path) -> dict[str, Any]:
    for name in ACCOUNTS:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
    return {}


def _line(row: dict[str, Any]) -> str:
    parts = [row["state"], f"{row['steps']} steps", *filter(None, [row["reason"]])]
    points = row["eval"]
    for kind in ("sampled", "greedy"):
        values = [point[f"accuracy_{kind}"] for point in points if point.get(f"accuracy_{kind}") is not None]
        if values:
            parts.append(f"{kind} {values[0]:.3f} -> {values[-1]:.3f}")
    return f"{row['name']:<12} {', '.join(parts)}"
