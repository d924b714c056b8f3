"""The demo on real servers, in which each process is killed once, and a server in the middle of a version. One table.

PYTHONPATH=src:. python scripts/gpu/kills.py RUN [ARGUMENTS of launch/cluster.py]

Both servers are killed together, because each needs half a minute to start. `back`: seconds until there is a new
process (a server answers its worker), `on`: until the next step after that. The launcher's output is in RUN.out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from memory import listener, url_of, workers
from table import ledger

from stillhouse.launch.config.files import read_config
from tests.sim.chaos.traps import Traps

HERE = Path(__file__).resolve().parent
CLUSTER = str(Path("launch", "cluster.py").resolve())
BY_IPC, BY_GROUP = (f"stillhouse.engines.sglang.requests:{name}" for name in ("tensor_update", "bucket_update"))
"""What the actor calls before it asks its server to take a bucket."""
BUCKETS = "--weights.bucket_bytes=65536"
"""So that a version of the built-in student has several."""
KILLS = (("learner-0",), ("actor-0",), ("teacher-0",), ("buffer-0",), ("server-teacher-0", "server-actor-0"))
IN_A_VERSION = "server-actor-0, in a version"
LIMIT_S = float(os.environ.get("KILL_LIMIT_S", "90"))
NEAR_1 = 0.02


class Run:
    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder, self.began_s = folder, time.monotonic()
        self.traps = Traps(folder.with_name(f"{folder.name}.traps"), (BY_IPC, BY_GROUP))
        config = ["--config", str(HERE / "gpu_demo.toml"), BUCKETS, *arguments, "--run-dir", str(folder)]
        with folder.with_name(f"{folder.name}.out").open("wb") as output:
            environment = {**os.environ, **self.traps.environment(os.environ["PYTHONPATH"])}
            command = [sys.executable, CLUSTER, *config]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def rows(self) -> list[dict[str, float]]:
        with suppress(OSError):
            text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
            whole = text.rpartition("\n")[0]  # the last line may not be whole yet
            return [row for row in map(json.loads, whole.splitlines()) if row["kind"] == "step"]
        return []

    def pid(self, who: str) -> int:
        """Pid of the newest process; 0: none. A server's is the one that answers at the URL that its worker noted."""
        if who.startswith("server-"):
            url = url_of(self.folder, who.removeprefix("server-"))
            found = listener(url) if url else None
            return found.pid if found is not None else 0
        return next((pid for pid, name in reversed(workers(self.folder).items()) if name == who), 0)  # pids may wrap

    def until(self, met: Callable[[], bool]) -> bool:
        limit_s = time.monotonic() + LIMIT_S
        while not met():
            if self.process.poll() is not None or time.monotonic() > limit_s:
                return False
            time.sleep(0.1)
        return True

    def after(self, struck_s: float, former: dict[str, int]) -> Iterator[str]:
        """A row for each of the killed, once they are back and a step was made."""
        back: dict[str, float] = {}

        def all_back() -> bool:
            for who, pid in former.items():
                if who not in back and self.pid(who.partition(",")[0]) not in (0, pid):
                    back[who] = time.monotonic() - struck_s
            return len(back) == len(former)

        came = self.until(all_back)
        n = len(self.rows())
        on = came and self.until(lambda: len(self.rows()) > n)
        on_s, step = time.monotonic() - struck_s, int(self.rows()[-1]["step"])
        for who in former:
            seen = [f"{back[who]:.1f}" if who in back else "-", f"{on_s:.1f}" if on else "-"]
            at = f"{struck_s - self.began_s:.1f}"
            yield f"| {' | '.join([who, at, *seen, str(step), 'ok' if on else 'FAILED'])} |"

    def kill(self, names: tuple[str, ...]) -> Iterator[str]:
        self.until(lambda: all(map(self.pid, names)))
        former = {who: self.pid(who) for who in names}
        for pid in former.values():
            with suppress(psutil.Error):
                psutil.Process(pid).kill()
        yield from self.after(time.monotonic(), former)

    def kill_in_a_version(self) -> Iterator[str]:
        """The server's scheduler, when its actor is about to send it the second bucket."""
        self.until(lambda: bool(self.pid("actor-0") and self.pid("server-actor-0")))
        worker, leader = self.pid("actor-0"), psutil.Process(self.pid("server-actor-0"))
        children = leader.children(recursive=True)
        scheduler = next((one for one in children if "scheduler" in " ".join(one.cmdline())), leader)
        point = BY_IPC if read_config(self.folder / "config.yaml").weights.way == "ipc" else BY_GROUP
        caught = self.traps.catch(point, "before", worker, n=2, others=[scheduler.pid], spare=True, timeout_s=LIMIT_S)
        if not caught:
            yield f"| {IN_A_VERSION} | - | - | - | - | FAILED: no version came |"
            return
        yield from self.after(time.monotonic(), {IN_A_VERSION: leader.pid})


def verdicts(run: Run) -> Iterator[tuple[str, bool]]:
    """What has to hold in the end."""
    code = run.process.wait(LIMIT_S)
    yield f"exit code {code}", code == 0
    with suppress(OSError):
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        yield f"ledger {ledger(summary)}", ledger(summary) == "balanced"
        yield f"{summary['steps']} steps, {summary['versions_published']} versions published", True
    ratios = [row["train/ratio_mean"] for row in run.rows() if row.get("train/ratio_mean") is not None]
    if ratios:
        near = max(abs(ratio - 1) for ratio in ratios) <= NEAR_1
        yield f"train/ratio_mean {min(ratios):.4f} to {max(ratios):.4f}, expected 1 +- {NEAR_1}", near
    audit = subprocess.run([sys.executable, CLUSTER, "audit", str(run.folder)], capture_output=True, encoding="utf-8")
    yield f"audit: {(audit.stdout.strip().splitlines() or ['-'])[-1]}", audit.returncode == 0


def main() -> int:
    run = Run(Path(sys.argv[1]), sys.argv[2:])
    lines: list[str] = []
    try:
        begun = "two steps" if run.until(lambda: len(run.rows()) >= 2) else "FAILED: no two steps"
        print(f"{begun} after {time.monotonic() - run.began_s:.1f} s", flush=True)
        for names in KILLS:
            lines += run.kill(names) if run.process.poll() is None else [f"| {' '.join(names)} | FAILED: run ended |"]
        lines += run.kill_in_a_version() if run.process.poll() is None else [f"| {IN_A_VERSION} | FAILED: run ended |"]
        held = list(verdicts(run))
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(20)
            run.process.kill()
        print("| killed | at s | back s | on s | at step | verdict |\n|---|---|---|---|---|---|", *lines, sep="\n")
    print(*(f"{'ok' if ok else 'FAILED'}: {text}" for text, ok in held), sep="\n")
    wrong = any("FAILED" in line for line in lines) or not all(ok for _, ok in held)
    print("WRONG" if wrong else "everything held")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
