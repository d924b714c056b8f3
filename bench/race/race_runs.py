"""Makes one run of a race: ours or TRL's, each alone, and evaluates its checkpoints afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.race.race import OURS, PEER, Point, Race
from bench.role_cpu import role_cpu_s

ROOT: Final = Path(__file__).resolve().parents[2]
TRL_PYTHON: Final = Path(os.environ.get("TRL_PYTHON", ROOT / ".venv-trl" / "bin" / "python"))
RUN_TIMEOUT_S: Final = 1800.0
WORKERS: Final = {"learner", "buffer", "actor", "teacher"}


def make(run: Path, settings: str, seed: int, train: Callable[[Path], Race], evaluator: Sequence[str]) -> Race:
    """Train in the folder `run`, evaluate the checkpoints that are there then, and write result.json. `evaluator`: a
    module with its flags; it reads the folder of checkpoints and writes scores.json into it, step -> scores."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    race = train(run)
    checkpoints = run / "checkpoints"
    module, *flags = evaluator
    call([sys.executable, "-m", module, str(checkpoints), *flags], run / "evaluation.log", threads=1)
    scores = {
        int(step): found
        for step, found in json.loads((checkpoints / "scores.json").read_text(encoding="utf-8")).items()
    }
    points = tuple(
        Point(step=step, train_s=train_s, scores=scores[step])
        for step, train_s in ((0, 0.0), *((point.step, point.train_s) for point in race.points))
        if step in scores
    )
    race = msgspec.structs.replace(race, settings=settings, seed=seed, points=points)
    (run / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(race)))
    return race


def trl(run: Path, given: Mapping[str, Any]) -> Race:
    """A run of bench/race/trl_side.py. Its settings and seed are those of `given`."""
    file = run / "settings.json"
    file.write_text(json.dumps({**given, "out": str(run), "launched_unix_s": time.time()}, indent=1), encoding="utf-8")
    call([str(TRL_PYTHON), "bench/race/trl_side.py", str(file)], run / "output.log", threads=given["threads"])
    lines = [json.loads(line) for line in (run / "times.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    return Race(
        side=PEER,
        settings="",
        seed=0,
        startup_s=lines[0]["startup_s"],
        steps=len(steps),
        train_s=steps[-1]["train_s"],
        cpu_s={PEER: steps[-1]["cpu_s"]},
        points=tuple(Point(step=line["step"], train_s=line["train_s"], scores={}) for line in steps),
    )


def ours(run: Path, words: Sequence[str], save_every: int) -> Race:
    """A run of launch/cluster.py without evaluations, with these words on its command line. Its time begins when the
    learner is ready, and has the writing of checkpoints in it."""
    folder = run / "run"
    command = [sys.executable, "launch/cluster.py", "--run-dir", str(folder), "--learner.eval_every=0"]
    command += [f"--learner.checkpoint_every={save_every}", "--learner.keep_checkpoints=1000", *words]
    launched_unix_s = time.time()
    with (run / "output.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment(1))
        cpu_s = watch(process, folder)
    if process.returncode:
        raise SystemExit(f"our run failed with exit code {process.returncode}: see {run / 'output.log'}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    began_unix_s = steps[0]["unix_s"] - steps[0]["time/step_s"]
    (folder / "checkpoints").rename(run / "checkpoints")
    return Race(
        side=OURS,
        settings="",
        seed=0,
        startup_s=began_unix_s - launched_unix_s,
        steps=len(steps),
        train_s=steps[-1]["unix_s"] - began_unix_s,
        cpu_s=cpu_s,
        points=tuple(Point(step=line["step"], train_s=line["unix_s"] - began_unix_s, scores={}) for line in steps),
    )


def watch(process: subprocess.Popen[bytes], folder: Path) -> dict[str, float]:
    """Wait until the run has ended. Role -> CPU seconds since all its workers were there; the last quarter of a second
    may be missing."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    give_up = time.monotonic() + RUN_TIMEOUT_S
    while process.poll() is None:
        if time.monotonic() > give_up:
            process.kill()  # its workers end with it
            raise SystemExit(f"our run took longer than {RUN_TIMEOUT_S:.0f} s: {folder}")
        now = role_cpu_s(folder, process.pid)
        if now.keys() >= WORKERS:
            trains = (folder / "metrics.jsonl").exists()
            first, last = (first, now) if trains and first else (now, now)
        time.sleep(0.25)
    return {role: value - first.get(role, 0.0) for role, value in last.items()}


def call(words: Sequence[str], log: Path, threads: int) -> None:
    with log.open("wb") as output:
        process = subprocess.run(
            words, cwd=ROOT, stdout=output, stderr=output, timeout=RUN_TIMEOUT_S, env=environment(threads)
        )
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed with exit code {process.returncode}: see {log}")


def environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def read(folder: Path) -> list[Race]:
    files = sorted(folder.glob("*/result.json"))
    return [msgspec.json.decode(file.read_bytes(), type=Race) for file in files]
