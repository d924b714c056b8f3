"""What each event costs the buffer's core, by the number of segments that it holds.

    python bench/buffer_held.py [--segments 4000,40000,400000] [--against FOLDER]

Rollouts of SEGMENTS segments run at one actor; all but the last segment of each is scored. Then a batch of BATCH
rollouts is asked for, and rollouts end, one after another, until it is formed. Nothing else is old or whole enough to
leave. This is done BATCHES times. Shown is the median time of each kind of event, in microseconds.

`--against`: a folder with another commit, which does the same in turn; then the ratios follow, its times over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import Role, WeightVersion

SEGMENTS = 8
TOKENS = 16
BATCH = 64
BATCHES = 5
VERSION = WeightVersion(0, 0)
IDS = np.ones(TOKENS, np.int32)
LOGPROBS = np.full(TOKENS, -0.5, np.float32)


class Load:
    """A buffer that holds rollouts of SEGMENTS - 1 scored segments each, and the time of each event."""

    def __init__(self, n_rollouts: int) -> None:
        self.times_s: dict[str, list[float]] = defaultdict(list)
        self.now_s = 0.0
        config = BufferConfig(
            max_staleness=n_rollouts // BATCH,
            batch_rollouts=BATCH,
            task_queue=n_rollouts,
            ticket_timeout_s=1e9,
            lease_s=1e9,
            idle_release_s=1e9,
        )
        self.state = BufferState(config, version=VERSION)
        self.state.peer_joined(0.0, "learner", "l", "1")
        self.state.peer_joined(0.0, "actor", "a", "1")
        self.state.peer_joined(0.0, "teacher", "t", "1", "default")
        self.send("learner", "l", m.LearnerStarted(VERSION, VERSION, 0, ()))
        self.send("teacher", "t", m.ScoreCredit(1 << 40, 1, 0))
        self.send("actor", "a", m.TicketCredit(n_rollouts, 1, 0))
        for at in range(0, n_rollouts, 512):
            ids = range(at, min(at + 512, n_rollouts))
            tasks = tuple(m.Task(i, "train", 1, m.Sampling(seed=i), teachers=("default",)) for i in ids)
            self.send("learner", "l", m.TasksOffered(tasks), tuple(IDS[:1] for _ in tasks))
        for i in range(n_rollouts):
            leases = [lease for index in range(SEGMENTS - 1) for lease in self.write(i, index)]
            self.score(leases)
        self.times_s.clear()

    def send(self, role: Role, name: str, message: m.Message, arrays: tuple[np.ndarray, ...] = ()) -> list[Outgoing]:
        began_s = time.perf_counter()
        out = self.state.handle(self.now_s, role, name, message, arrays)
        self.times_s[type(message).__name__].append(time.perf_counter() - began_s)
        return out

    def write(self, rollout: int, index: int) -> list[int]:
        """The leases that are granted for it."""
        begin, final = index * TOKENS, index == SEGMENTS - 1
        n = 1 + rollout % TOKENS if final else TOKENS  # so that the mean length changes with each
        sampled = np.ones(n, np.uint8)
        sampled[: index == 0] = 0
        spans = (m.VersionSpan(VERSION, begin, begin + n),)
        reason, reward = ("stop", 1.0) if final else (None, None)
        name = f"train-{rollout}-0-0"
        message = m.Segment(name, index, begin, begin + n, spans, final, reason, reward)
        out = self.send("actor", "a", message, (IDS[:n], LOGPROBS[:n], sampled))
        return [item.lease_id for o in out if isinstance(o.message, m.ScoreWork) for item in o.message.items]

    def score(self, leases: list[int], n_tokens: int = TOKENS) -> list[Outgoing]:
        return self.send("teacher", "t", m.Scores(tuple(leases)), tuple(LOGPROBS[:n_tokens] for _ in leases))

    def tick(self, kind: str) -> None:
        self.now_s += 0.05
        began_s = time.perf_counter()
        self.state.tick(self.now_s)
        self.times_s[kind].append(time.perf_counter() - began_s)


def train_one(load: Load, step: int) -> None:
    """Ask for a batch, let rollouts end until it comes, and train it."""
    load.send("learner", "l", m.BatchWanted(WeightVersion(0, step)))
    batch: m.Batch | None = None
    for rollout in range(step * BATCH, (step + 1) * BATCH):
        assert batch is None, "the batch came too early"
        leases = load.write(rollout, SEGMENTS - 1)
        out = load.score(leases, 1 + rollout % TOKENS)
        batch = next((o.message for o in out if isinstance(o.message, m.Batch)), None)
        load.tick("tick, a rollout has ended and a batch is wanted")
    assert batch is not None and len(batch.items) == BATCH
    load.times_s[f"a batch of {BATCH} rollouts is formed"].append(load.times_s["Scores"].pop())
    load.send("learner", "l", m.BatchTrained(batch.batch_id, WeightVersion(0, step + 1)))


def measure(n_rollouts: int) -> dict[str, float]:
    """Median time of each kind of event, in microseconds."""
    load = Load(n_rollouts)
    times_s = load.times_s
    for _ in range(5):
        load.send("actor", "a", m.SnapshotWanted())
        load.tick("tick")
    for step in range(BATCHES):
        train_one(load, step)
    return {kind: statistics.median(seconds) * 1e6 for kind, seconds in sorted(times_s.items())}


def measured_by(folder: Path, n_segments: int) -> dict[str, float]:
    """The same in a new process, with the code in `folder`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--segments", str(n_segments), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=True, timeout=600)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", default="4000,40000,400000")
    parser.add_argument("--against", type=Path, help="a folder with another commit of this repository")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(one) for one in options.segments.split(",")]
    if options.json:
        print(json.dumps(measure(sizes[0] // SEGMENTS)))
        return
    here = Path(__file__).parents[1]
    folders = {"this": here} | ({} if options.against is None else {"other": options.against.resolve()})
    got = {name: [measured_by(folder, size) for size in sizes] for name, folder in folders.items()}
    for name, columns in got.items():
        print(f"{name + ' commit, us; segments held:':52}" + "".join(f"{size:>12,}" for size in sizes))
        for kind in columns[0]:
            print(f"{kind:52}" + "".join(f"{column[kind]:12,.0f}" for column in columns))
    if options.against is not None:
        print("other / this")
        for kind in got["this"][0]:
            ratios = [other[kind] / this[kind] for other, this in zip(got["other"], got["this"], strict=True)]
            print(f"{kind:52}" + "".join(f"{ratio:12.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
