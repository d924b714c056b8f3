"""Real SGLang servers for the tests of this folder: one warmed interpreter, a student and a teacher per session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch

from stillhouse.engines.base import EngineMismatch, GenerationRequest
from stillhouse.engines.sglang.config import SGLangConfig, SwapMode
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.models.description import vocabulary_size
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import Sampling, TopIdsWanted, VersionSpan
from stillhouse.sglang_server.servers import DEFAULT_PYTHON, Servers, SGLangServer
from tests.patience import PATIENCE_S, Limit

DATA: Final = Path(__file__).resolve().parents[2] / "builtin" / "data"
STUDENT: Final = DATA / "student"
TEACHER: Final = DATA / "teacher"
VOCAB: Final = vocabulary_size(STUDENT)
READY_S: Final = PATIENCE_S
TOLERANCE: Final = 1e-4
Named: TypeAlias = list[tuple[str, torch.Tensor]]
"""Tensors of a model, by name."""


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    if not DEFAULT_PYTHON.exists():
        pytest.skip("no .venv-sglang: make sglang-cpu")
    with Servers(tmp_path_factory.mktemp("sglang")) as servers:
        yield servers


def start(servers: Servers, *names: str) -> list[SGLangServer]:
    """Servers of the student, ready."""
    started = [servers.start(name, STUDENT) for name in names]
    servers.wait_ready(started, READY_S)
    return started


@pytest.fixture(scope="package")
def student(servers: Servers) -> SGLangServer:
    """The weights of its files, which no test changes."""
    return start(servers, "student")[0]


@pytest.fixture(scope="package")
def teacher(servers: Servers) -> SGLangServer:
    server = servers.start("teacher", TEACHER)
    servers.wait_ready([server], READY_S)
    return server


@pytest.fixture(scope="package")
def three(servers: Servers) -> list[SGLangServer]:
    """Servers that outlive a test, with whatever weights it left there."""
    return start(servers, "push-0", "push-1", "push-2")


@pytest.fixture(scope="package")
def student_weights() -> Named:
    model = load_causal_lm(STUDENT, device="cpu", dtype="float32", attention="sdpa")
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.fixture(scope="package")
def retracts(student: SGLangServer) -> None:
    """Skips where requests cannot stay at a server while its weights change."""
    try:
        SGLangEngine(student.url, SGLangConfig(update_mode="retract"), vocab_size=VOCAB).close()
    except EngineMismatch as error:
        pytest.skip(str(error))


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> SwapMode:
    """For parametrize with indirect=True."""
    if request.param == "retract":
        request.getfixturevalue("retracts")
    return request.param


@pytest.fixture
def engine(student: SGLangServer) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(student.url, SGLangConfig(), vocab_size=VOCAB)
    yield engine
    engine.close()


@dataclass
class Answer:
    """Everything that came back for one request."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    top_ids: list[list[int]] = field(default_factory=list[list[int]])
    finish_reason: str | None = None
    error: str | None = None


def request(
    name: str,
    prompt: Sequence[int],
    n: int = 16,
    *,
    temperature: float = 1.0,
    stops: tuple[int, ...] = (),
    top_ids: TopIdsWanted | None = None,
    **more: Any,
) -> GenerationRequest:
    sampling = Sampling(temperature=temperature, max_new_tokens=n, top_ids=top_ids, **more)
    return GenerationRequest(name, np.array(prompt, np.int32), sampling, n, stops)


def collect(engine: SGLangEngine, answers: dict[str, Answer], *, timeout_s: float = PATIENCE_S) -> None:
    """Poll until every request of `answers` has ended."""
    limit = Limit(timeout_s)
    while any(answer.finish_reason is None for answer in answers.values()):
        assert not limit.passed, f"no end after {limit}: {answers}"
        take(engine, answers, 0.1)


def take(engine: SGLangEngine, answers: dict[str, Answer], timeout_s: float) -> None:
    """One poll into `answers`."""
    for delta in engine.poll(timeout_s):
        answer = answers[delta.request_id]
        assert answer.finish_reason is None, f"a delta of {delta.request_id} after its last one"
        offset = len(answer.ids)
        answer.ids += delta.token_ids.tolist()
        answer.logprobs += delta.logprobs.tolist()
        answer.spans += [VersionSpan(s.version, s.start + offset, s.end + offset) for s in delta.spans]
        answer.top_ids += [ids.tolist() for ids in delta.top_ids or ()]
        answer.finish_reason, answer.error = delta.finish_reason, delta.error


def generate(engine: SGLangEngine, requests: Sequence[GenerationRequest]) -> dict[str, Answer]:
    answers = {item.request_id: Answer() for item in requests}
    for item in requests:
        engine.submit(item)
    collect(engine, answers)
    return answers


class Reference:
    """The slow way to the same numbers: transformers, one sequence at a time."""

    def __init__(self, path: Path) -> None:
        self._model = load_causal_lm(path, device="cpu", dtype="float32", attention="sdpa")

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], start: int, temperature: float = 1.0) -> torch.Tensor:
        """[n, V] at positions start .. len(ids) - 1, each given what stands before it."""
        logits = self._model(torch.tensor([list(ids)])).logits[0, start - 1 : len(ids) - 1]
        return torch.log_softmax(logits / (temperature or 1.0), dim=-1)

    def of_tokens(self, ids: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
        rows = self.logprobs(ids, start, temperature)
        return rows.gather(1, torch.tensor(list(ids[start:]))[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(self._model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="package")
def student_reference() -> Reference:
    return Reference(STUDENT)


@pytest.fixture(scope="package")
def teacher_reference() -> Reference:
    return Reference(TEACHER)
