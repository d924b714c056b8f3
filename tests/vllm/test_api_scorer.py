"""The API engine against a real vLLM server, and the stub of vLLM beside it."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.engines.base import EngineLost, EngineMismatch, ScoreRequest
from stillhouse.protocol.payloads.kind import ScoreOptions, ScoreResult
from tests.engines.api import completions
from tests.engines.api.completions import WINDOW, Api, Reply
from tests.engines.api.test_api_scorer import scoring, text_ids
from tests.sglang.conftest import TOLERANCE, Reference
from tests.vllm.attached import Attached, serving, wait_ready


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    with serving(TEACHER_DIR, tmp_path_factory.mktemp("vllm") / "server.log") as server:
        wait_ready(server)
        yield server


@pytest.fixture
def at(server: Attached) -> Api:
    return Api("vllm", url=server.url)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(TEACHER_DIR)


def rows() -> list[ScoreRequest]:
    """Texts, ids that are no text's, and the longest that fits; all but the last again with more before them."""
    ids = np.random.default_rng(0).integers(0, 300, 400).astype(np.int32)
    long = np.tile(text_ids(), 40)[: WINDOW - 1]
    return [*(ScoreRequest(text_ids(f"{n}" * n), 1 + n) for n in range(4)), ScoreRequest(ids, 1), ScoreRequest(long, 1)]


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
@pytest.mark.parametrize("send", ["ids", "text"])
def test_scores_are_those_of_transformers(at: Api, reference: Reference, form: str, send: str, tmp_path: Path) -> None:
    """Over whole rows, computed in pieces, and again when vLLM has them in its prefix cache."""
    asked = rows() if send == "ids" else rows()[:4]
    with scoring(at, tmp_path, form=form, send=send, reference=str(TEACHER_DIR), timeout_s=300) as scorer:
        first, again = scorer.score(asked), scorer.score(asked)
        assert scorer.way.form == form and scorer.way.text == (send == "text") and scorer.way.names_ids
        assert scorer.max_context == WINDOW - 1 and not any("unscored" in name for name in scorer.figures)
    for request, *results in zip(asked, first, again, strict=True):
        expected = reference.of_tokens(request.token_ids.tolist(), request.start)
        for result in results:
            assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_sets_of_the_likeliest_tokens_are_those_of_transformers(at: Api, reference: Reference, tmp_path: Path) -> None:
    request = ScoreRequest(text_ids(), 7)
    with scoring(at, tmp_path) as scorer:
        (result,) = scorer.score([request], ScoreOptions(top_k=completions.MOST_LIKELIEST))
    rows_NV = reference.logprobs(request.token_ids.tolist(), request.start)
    assert result.top_ids is not None and result.top_logprobs is not None
    assert result.top_logprobs == pytest.approx(rows_NV.topk(completions.MOST_LIKELIEST).values.numpy(), abs=TOLERANCE)
    named_NK = np.take_along_axis(rows_NV.numpy(), result.top_ids.astype(np.int64), axis=1)
    assert named_NK == pytest.approx(result.top_logprobs, abs=TOLERANCE)


def test_what_cannot_be_served_is_refused_at_the_start(at: Api, tmp_path: Path) -> None:
    with pytest.raises(EngineMismatch, match="which is greater than max allowed: 20"), scoring(at, tmp_path, top_k=64):
        pass
    with pytest.raises(EngineMismatch, match="The model `b` does not exist"), scoring(at, tmp_path, model="b"):
        pass
    with pytest.raises(EngineMismatch, match="other weights"), scoring(at, tmp_path, reference=str(STUDENT_DIR)):
        pass


def post(url: str, body: Reply) -> tuple[int, Reply]:
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


IDS = [*range(5, 60), 300, 313]
SCORED: dict[str, Reply] = {
    "prompt_logprobs": {"prompt": IDS, "prompt_logprobs": 0},
    "sets": {"prompt": IDS, "prompt_logprobs": 3, "return_token_ids": True},
    "echo": {"prompt": IDS, "echo": True, "logprobs": 1},
    "echo with ids": {"prompt": IDS, "echo": True, "logprobs": 1, "return_token_ids": True},
    "text": {"prompt": "1+2=3 na\u00efve", "prompt_logprobs": 0, "return_token_ids": True, "add_special_tokens": False},
}
REFUSED: dict[str, Reply] = {
    "too many sets": {"prompt": IDS, "prompt_logprobs": 21},
    "too many sets by echo": {"prompt": IDS, "echo": True, "logprobs": 21},
    "too long": {"prompt": [5] * (WINDOW + 7), "prompt_logprobs": 0},
    "no room for an answer": {"prompt": [5] * WINDOW, "prompt_logprobs": 0},
    "no such id": {"prompt": [5, 330], "prompt_logprobs": 0},
    "no such model": {"prompt": IDS, "model": "b"},
}


@pytest.mark.parametrize("name", [*SCORED, *REFUSED])
def test_the_stub_says_what_the_server_says(server: Attached, name: str) -> None:
    body: Reply = {"model": "a-model", "max_tokens": 1, "temperature": 1.0, "top_p": 1.0} | {**SCORED, **REFUSED}[name]
    with completions.serving(Api("vllm")) as stub:
        (status, said), (stub_status, stub_said) = post(server.url, body), post(stub.url, body)
    assert stub_status == status == (404 if name == "no such model" else 400 if name in REFUSED else 200)
    if name in REFUSED:
        assert stub_said == said
        return
    theirs, ours = said["choices"][0], stub_said["choices"][0]
    assert stub_said["usage"].items() <= said["usage"].items() and stub_said.keys() <= said.keys()
    assert ours.keys() <= theirs.keys() and ours.get("prompt_token_ids") == theirs["prompt_token_ids"]
    assert plain(ours["prompt_logprobs"]) == plain(theirs["prompt_logprobs"])
    if body.get("echo"):
        n = len(IDS)
        lists, stub_lists = theirs["logprobs"], ours["logprobs"]
        assert stub_lists["tokens"][:n] == lists["tokens"][:n] and len(lists["tokens"]) == n + 1
        assert stub_lists["token_logprobs"][1:n] == pytest.approx(lists["token_logprobs"][1:n], abs=TOLERANCE)


def plain(sets: list[dict[str, Any] | None]) -> list[Any]:
    """Ids, texts and log-probs, for a comparison."""
    return [
        one
        if one is None
        else {i: (entry["decoded_token"], pytest.approx(entry["logprob"], abs=TOLERANCE)) for i, entry in one.items()}
        for one in sets
    ]


def test_many_requests_at_once_are_all_answered(at: Api, reference: Reference, tmp_path: Path) -> None:
    """More than the server computes together: the rest wait there, and none is refused."""
    requests = [ScoreRequest(text_ids(str(n)), 20) for n in range(64)]
    with scoring(at, tmp_path, max_concurrent=64, timeout_s=300) as scorer:
        results = scorer.score(requests)
        assert scorer.figures["api_waits_total"] == 0
    for request, result in zip(requests[::9], results[::9], strict=True):
        expected = reference.of_tokens(request.token_ids.tolist(), request.start)
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_a_server_that_is_killed_costs_only_the_scores_it_owed(server: Attached, at: Api, tmp_path: Path) -> None:
    """The last test: no server is left."""
    requests = [ScoreRequest(np.tile(text_ids(str(n)), 9), 1) for n in range(48)]
    with scoring(at, tmp_path, timeout_s=8) as scorer:
        results: list[ScoreResult] = []
        thread = threading.Thread(target=lambda: results.extend(scorer.score(requests)))
        sent = scorer.link.requests_total + 20
        thread.start()
        while scorer.link.requests_total < sent:
            time.sleep(0.01)
        server.kill()
        thread.join()
        lost = [bool(np.isnan(result.logprobs).all()) for result in results]
        whole = [bool(np.isfinite(result.logprobs).all()) for result in results]
        assert any(lost) and any(whole) and all(a != b for a, b in zip(lost, whole, strict=True))
        assert scorer.figures["api_unscored_unavailable_total"] == sum(
            len(result.logprobs) for result in results if np.isnan(result.logprobs).any()
        )
    with pytest.raises(EngineLost, match="ClientConnectorError"), scoring(at, tmp_path, timeout_s=1):
        pass
