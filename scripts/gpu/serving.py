"""Tokens per second of one SGLang server: under an actor, and under SGLang's own bench_serving, in turn, equal lengths.

PYTHONPATH=src:. python scripts/gpu/serving.py URL MODEL [--running 64,256] [--rounds 2] [--prompt 128] [--answer 256]

The actor is the product's process (actors.worker.main), with a buffer's end that gives it as many tickets as it has
room for; only `ignore_eos` is changed. Both sides sample at temperature 1, from prompts made by the same rule, and keep
`running` requests at the server, until rounds * running have ended. Before, `running` short ones are sent, which are
not counted, and the server forgets its prefixes. The actor also gets each token's log-prob, and sends segments.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tests.wire
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol import messages as m
from tests.wire import RUN, ScriptedBuffer, acknowledgement

GOAL = 0.95
WARM_TOKENS = 32
"""What bench_serving's own warmup asks for."""
ACTOR = """
import logging, sys
from pathlib import Path
from types import SimpleNamespace
import msgspec
from stillhouse.actors.config import ActorConfig
from stillhouse.engines.sglang.features import NEUTRAL
from stillhouse.protocol.context import RoleContext
from stillhouse.weights.config import WeightsConfig
import stillhouse.actors.worker

NEUTRAL["ignore_eos"] = True
logging.basicConfig(level="WARNING")
settings = dict(engine="sglang", urls=[{url!r}], max_concurrent_rollouts={running})
config = SimpleNamespace(
    actor=msgspec.convert(settings, ActorConfig), models=SimpleNamespace(student={model!r}), mixed_teacher="",
    weights=WeightsConfig(), learner=SimpleNamespace(tasks=SimpleNamespace(env="single_turn")),
)
sys.exit(stillhouse.actors.worker.main(RoleContext(
    role="actor", index=0, name="actor-0", incarnation="first", run_id={run!r}, run_dir=Path({folder!r}),
    buffer_address={address!r}, resume=False, config=config, server_url={url!r},
)))
"""
BENCH = """
import runpy, sys, types
sys.modules["datasets"] = types.SimpleNamespace(load_dataset=None)  # one of its data sets imports this name
runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
"""


class Size(NamedTuple):
    running: int
    rounds: int
    prompt: int
    answer: int
    limit_s: float

    @property
    def requests(self) -> int:
        return self.running * self.rounds


class Desk(ScriptedBuffer):
    """A buffer's end that gives one actor tickets for rollouts of given lengths, and counts what comes back."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        self._size, self._vocabulary, self._random = size, vocabulary, np.random.default_rng(42)
        self._given = self.tokens = self.finished = 0
        self.failed: list[str] = []
        self.ready, self.done = threading.Event(), threading.Event()
        self._left = self._answer_tokens = 0
        super().__init__(self._take)

    def go(self, requests: int, answer: int) -> float:
        """Seconds from the first ticket to the last segment."""
        self.tokens, self._left, self._answer_tokens = 0, requests, answer
        self.finished = -requests
        self.done.clear()
        began_s = time.monotonic()
        self._give(min(requests, self._size.running))
        if not self.done.wait(self._size.limit_s):
            raise RuntimeError(f"{-self.finished} of {requests} rollouts have not ended; failed: {self.failed[:3]}")
        return time.monotonic() - began_s

    def _give(self, n: int) -> None:
        n = min(n, self._left)
        self._left -= n
        ids = range(self._given, self._given + n)
        self._given += n
        tickets = tuple(
            m.Ticket(
                *(f"train-{i}-0-0", i, 0, "train", m.Sampling(max_new_tokens=self._answer_tokens, seed=i)),
                *("single_turn", "", "7", m.WeightVersion(0, 0)),
            )
            for i in ids
        )
        starts = self._random.integers(0, self._vocabulary, n)  # as bench_serving's random-ids
        places = np.arange(self._size.prompt)
        prompts = [
            ((start + i + places) % self._vocabulary).astype(np.int32) for start, i in zip(starts, ids, strict=True)
        ]
        if tickets:
            self.send(m.Tickets(tickets), prompts, to=("actor", "actor-0"))

    def _take(self, message: m.Message) -> m.Message | None:
        match message:
            case m.TicketCredit():
                self.ready.set()
            case m.Segment():
                self.tokens += message.end - max(message.start, self._size.prompt)
                self._count(int(message.final))
            case m.RolloutFailed():
                self.failed.append(f"{message.reason}: {message.detail}")
                self._count(1)
            case _:
                pass
        return acknowledgement(message)

    def _count(self, n: int) -> None:
        self.finished += n
        self._give(n)
        if n and self.finished == 0:
            self.done.set()


def by_actor(url: str, model: str, size: Size) -> tuple[float, int]:
    """(tokens per second, tokens)."""
    tokenizer = FileTokenizer(model)
    tests.wire.VOCAB = tokenizer.fingerprint
    with tempfile.TemporaryDirectory() as folder, Desk(size, len(tokenizer.get_vocab())) as desk:
        settings = {"url": url, "model": model, "running": size.running, "run": RUN, "folder": folder}
        code = ACTOR.format(**settings, address=desk.address)
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            if not desk.ready.wait(size.limit_s):
                raise RuntimeError("the actor did not come")
            desk.go(size.running, min(WARM_TOKENS, size.answer))
            urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=30).read()
            seconds = desk.go(size.requests, size.answer)
            desk.send(m.Shutdown(True, "done"), to=("actor", "actor-0"))
            process.wait(size.limit_s)
        finally:
            process.kill()
            process.wait()
        if desk.failed:
            raise RuntimeError(f"{len(desk.failed)} rollouts failed: {desk.failed[0]}")
        return desk.tokens / seconds, desk.tokens


def by_sglang(url: str, model: str, size: Size) -> tuple[float, int]:
    """The same of bench_serving."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.jsonl")
        sizes = {
            "--num-prompts": size.requests,
            "--max-concurrency": size.running,
            "--warmup-requests": size.running,
            "--random-input-len": size.prompt,
            "--random-output-len": size.answer,
            "--random-range-ratio": 1.0,
        }
        words = ["--backend", "sglang", "--base-url", url, "--model", model, "--dataset-name", "random-ids"]
        words += [
            "--tokenize-prompt",
            "--flush-cache",
            "--temperature",
            "1",
            "--disable-tqdm",
            "--output-file",
            str(result),
        ]
        words += [str(word) for pair in sizes.items() for word in pair]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        python = os.environ["SGLANG_PYTHON"]
        ran = subprocess.run(
            [python, "-c", BENCH, *words], env=environment, capture_output=True, encoding="utf-8", timeout=size.limit_s
        )
        if not result.exists():
            raise RuntimeError(f"bench_serving: rc {ran.returncode}: {(ran.stdout + ran.stderr)[-1500:]}")
        said = json.loads(result.read_text(encoding="utf-8").splitlines()[-1])
        return said["output_throughput"], said["total_output_tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--running", default="64,256")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--limit-s", type=float, default=90.0, help="of each side at each size")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(143))
    failed = False
    print(f"tokens/s of {args.model}, prompts of {args.prompt} and answers of {args.answer} tokens", flush=True)
    print("| running | requests | tokens ours | theirs | ours tokens/s | bench_serving | ratio | verdict |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for running in map(int, args.running.split(",")):
        size = Size(running, args.rounds, args.prompt, args.answer, args.limit_s)
        try:
            (theirs, n_theirs), (ours, n_ours) = (
                by_sglang(args.url, args.model, size),
                by_actor(args.url, args.model, size),
            )
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"| {running} | FAILED: {error} |", flush=True)
            continue
        wrong = "FAILED: other lengths" if not n_ours == n_theirs == size.requests * size.answer else ""
        failed |= bool(wrong)
        verdict = wrong or ("ok" if ours / theirs >= GOAL else f"below {GOAL}")
        cells = (
            running,
            size.requests,
            n_ours,
            n_theirs,
            f"{ours:.0f}",
            f"{theirs:.0f}",
            f"{ours / theirs:.2f}",
            verdict,
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
