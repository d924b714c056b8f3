"""Scores from completions APIs are those of the embedded teacher, and nothing wrong in an answer is believed."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.engines.api.config import ApiConfig
from stillhouse.engines.api.provider import PROVIDER
from stillhouse.engines.api.scorer import ApiScorer
from stillhouse.engines.base import BudgetSpent, EngineLost, EngineMismatch, ScoreRequest
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.payloads.kind import ScoreOptions
from stillhouse.teachers.config import TeacherConfig, TokenizerOf
from stillhouse.teachers.self_check import self_check
from tests.engines.api.completions import KEY, Api, Kind, Reply, embedded_score, serving
from tests.teachers.test_other_tokenizer import expect_what_the_embedded_one_sends
from tests.teachers.tiny_tokenizers import far_model

KINDS: tuple[Kind, ...] = ("vllm", "sglang", "fireworks", "together")
TEXT = "<|im_start|>user\n83370+71033=<|im_end|>\n<|im_start|>assistant\n3+0=3;7+3=10 #154403"


@pytest.fixture(params=KINDS)
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    with serving(Api(request.param)) as api:
        yield api


@pytest.fixture
def vllm() -> Iterator[Api]:
    with serving(Api("vllm")) as api:
        yield api


@contextmanager
def scoring(
    api: Api,
    run_dir: Path,
    top_k: int = 0,
    folder: Path = STUDENT_DIR,
    tokenizer: TokenizerOf = "student",
    **keys: Any,
) -> Generator[ApiScorer]:
    """As a teacher starts it."""
    teacher = TeacherConfig(engine="api", api=ApiConfig(url=api.url, **keys), top_k=top_k, tokenizer=tokenizer)
    config = SimpleNamespace(teacher=teacher, models=SimpleNamespace(teacher=str(folder)))
    context = SimpleNamespace(config=config, run_dir=run_dir, name="teacher-0")
    scorer = cast(ApiScorer, PROVIDER.scorer(cast(Any, context)).start())
    try:
        yield scorer
    finally:
        scorer.close()


def text_ids(more: str = "") -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(FileTokenizer(STUDENT_DIR).encode(TEXT + more, add_special_tokens=False), np.int32)


def expected(request: ScoreRequest, top_k: int = 0) -> Any:
    return embedded_score(TEACHER_DIR, request, ScoreOptions(top_k=top_k))


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_with_another_tokenizer_gets_what_the_embedded_teacher_sends(kind: Kind, tmp_path: Path) -> None:
    top_k = 6 if kind == "vllm" else 0
    with serving(Api(kind)) as api, scoring(api, tmp_path, top_k, TEACHER_DIR, tokenizer="other") as scorer:
        expect_what_the_embedded_one_sends(scorer, far_model(tmp_path), TEACHER_DIR, top_k=top_k)


def test_scores_are_those_of_the_embedded_teacher(api: Api, tmp_path: Path) -> None:
    requests = [ScoreRequest(text_ids(f"{n}" * n), 5 + n) for n in range(6)]
    with scoring(api, tmp_path, max_concurrent=2) as scorer:
        results = scorer.score([*requests, ScoreRequest(text_ids(), len(text_ids()))])
        figures = scorer.figures
    for request, result in zip(requests, results[:-1], strict=True):
        assert result.logprobs == pytest.approx(expected(request).logprobs, abs=1e-4)
    assert not len(results[-1].logprobs) and not any("unscored" in name for name in figures)
    assert api.most_at_once <= 2
    assert all(isinstance(asked["prompt"], str) == (api.kind == "together") for asked in api.asked[-6:])


def test_sets_of_the_likeliest_tokens_come_by_id(vllm: Api, tmp_path: Path) -> None:
    request = ScoreRequest(text_ids(), 9)
    with scoring(vllm, tmp_path) as scorer:
        (result,) = scorer.score([request], ScoreOptions(top_k=5))
    wanted = expected(request, 5)
    assert result.top_ids is not None and np.array_equal(result.top_ids, wanted.top_ids)
    assert result.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("sglang", "top_k needs prompt_logprobs"), ("vllm", "Requested prompt logprobs of")],
)
def test_sets_that_an_api_cannot_send_are_refused_at_the_start(kind: Kind, said: str, tmp_path: Path) -> None:
    with serving(Api(kind)) as api, pytest.raises(EngineMismatch, match=said), scoring(api, tmp_path, top_k=64):
        pass


def lists_of(reply: Reply) -> Reply:
    """The log-probs of the prompt in an answer by echo."""
    return reply["prompt"][0]["logprobs"] if "prompt" in reply else reply["choices"][0]["logprobs"]


def put(reply: Reply, at: int, value: object) -> Reply:
    """Another log-prob."""
    sets = reply["choices"][0].get("prompt_logprobs")
    if sets is None:
        lists_of(reply)["token_logprobs"][at] = value
    else:
        sets[at] = {i: entry | {"logprob": value} for i, entry in sets[at].items()}
    return reply


def cut(reply: Reply) -> Reply:
    """An answer about a shorter text."""
    if "prompt_logprobs" in reply["choices"][0]:
        del reply["choices"][0]["prompt_logprobs"][-1]
    else:
        lists = lists_of(reply)
        lists |= {name: of[:-3] for name, of in lists.items()}
    return reply


def swapped(reply: Reply) -> Reply:
    """Another token at one place."""
    choice = reply["choices"][0]
    if "prompt_logprobs" in choice:
        choice["prompt_logprobs"][9] = {"3": {"logprob": -1.0}}
    for ids in (choice.get("prompt_token_ids"), lists_of(reply).get("token_ids") if lists_of(reply) else None):
        if ids is not None:
            ids[9] += 1
    return reply


WRONG: dict[str, Callable[[Reply], Reply]] = {
    "malformed": lambda reply: {"choices": "none"},
    "count": cut,
    "ids": swapped,
    "not_finite": lambda reply: put(reply, 8, None),
    "positive": lambda reply: put(reply, 8, 0.5),
}


def test_wrong_answers_are_masked_and_counted(api: Api, tmp_path: Path) -> None:
    good = ScoreRequest(text_ids(), 5)
    with scoring(api, tmp_path) as scorer:
        for n, (reason, spoil) in enumerate(WRONG.items(), 1):
            bad, before, figures = ScoreRequest(text_ids("7" * n), 5), len(api.asked), dict(scorer.figures)
            n_bad = len(bad.token_ids)
            api.wrong = lambda reply, n_bad=n_bad, spoil=spoil: (
                spoil(reply) if reply["usage"]["prompt_tokens"] == n_bad else reply
            )
            results = scorer.score([bad, good])
            again = scorer.score([bad])
            lost = np.isnan(results[0].logprobs)
            wanted = {"ids": lost.sum(), "not_finite": 1, "positive": 1}.get(reason, len(lost))
            assert lost.sum() == wanted and lost.any(), reason
            assert not np.isnan(results[1].logprobs).any()
            # In a text the API may have other tokens.
            counted = "tokens" if api.kind == "together" and reason in ("count", "ids") else reason
            name = f"api_unscored_{counted}_total"
            assert scorer.figures[name] - figures.get(name, 0.0) >= lost.sum()
            paid = 3 if reason == "malformed" else 2
            assert len(api.asked) - before == paid, "what stays wrong is not paid for again"
            assert np.isnan(again[0].logprobs).any()


def test_minus_9999_stands_for_no_probability(vllm: Api, tmp_path: Path) -> None:
    with scoring(vllm, tmp_path) as scorer:
        vllm.wrong = lambda reply: put(reply, 8, -9999.0)
        (result,) = scorer.score([ScoreRequest(text_ids(), 5)])
    assert np.flatnonzero(np.isnan(result.logprobs)).tolist() == [3]


def test_a_rate_limit_makes_all_wait_as_long_as_it_says(vllm: Api, tmp_path: Path) -> None:
    with scoring(vllm, tmp_path) as scorer:
        vllm.refusals = [(429, {"Retry-After": "1"}), (503, {}), (500, {})]
        before = scorer.budget.tokens
        (result,) = scorer.score([ScoreRequest(text_ids(), 5)])
        assert scorer.figures["api_waits_total"] == 3
        assert scorer.budget.tokens - before == len(text_ids()) + 1, "refused tries cost nothing"
    assert np.isfinite(result.logprobs).all()


def test_an_api_that_does_not_recover_in_time_is_counted(vllm: Api, tmp_path: Path) -> None:
    with scoring(vllm, tmp_path, timeout_s=0.6) as scorer:
        vllm.refusals = [(429, {"Retry-After": "Wed, 21 Oct 2122 07:28:00 GMT"})]
        (result,) = scorer.score([ScoreRequest(text_ids(), 5)])
        assert scorer.figures["api_unscored_unavailable_total"] == len(result.logprobs)


def test_the_first_answer_may_take_longer(vllm: Api, tmp_path: Path) -> None:
    """As where a server compiles for its first request."""
    vllm.slow_s = [1.2]
    with scoring(vllm, tmp_path, timeout_s=0.6) as scorer:
        assert len(vllm.asked) == 3 and scorer.figures["api_waits_total"] == 0


def test_an_api_that_is_away_at_the_start_is_lost(tmp_path: Path) -> None:
    with serving(Api("vllm")) as api:
        pass
    with pytest.raises(EngineLost, match="ClientConnectorError"), scoring(api, tmp_path, timeout_s=0.5, model="m"):
        pass


def test_a_refused_text_is_masked_and_a_refused_key_ends_the_teacher(vllm: Api, tmp_path: Path) -> None:
    with scoring(vllm, tmp_path) as scorer:
        vllm.refusals = [(400, {})]
        (result,) = scorer.score([ScoreRequest(text_ids(), 5)])
        assert np.isnan(result.logprobs).all() and scorer.figures["api_unscored_refused_total"] == len(result.logprobs)
        vllm.refusals = [(402, {})]
        with pytest.raises(EngineLost, match="HTTP 402"):
            scorer.score([ScoreRequest(text_ids("1"), 5)])


def test_the_key_is_in_no_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    with serving(Api("vllm", key=KEY)) as api:
        with scoring(api, tmp_path, key_env="A_KEY") as scorer:
            api.refusals = [(400, {})]
            scorer.score([ScoreRequest(text_ids(), 5)])
        monkeypatch.setenv("A_KEY", "sk-another")
        with pytest.raises(EngineMismatch) as refused, scoring(api, tmp_path, key_env="A_KEY"):
            pass
    assert "HTTP 401: " in str(refused.value) and "sk-another" not in str(refused.value)
    assert "no, ***" in caplog.text and KEY not in caplog.text
    assert all(KEY not in file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    monkeypatch.delenv("A_KEY")
    with (
        pytest.raises(EngineMismatch, match="the environment variable A_KEY has no key"),
        scoring(api, tmp_path, key_env="A_KEY"),
    ):
        pass


def test_a_budget_is_never_exceeded_and_outlives_a_restart(vllm: Api, tmp_path: Path) -> None:
    with scoring(vllm, tmp_path) as scorer:
        probed, n = scorer.budget.tokens, len(text_ids()) + 1
    sent = sum(len(asked["prompt"]) + 1 for asked in vllm.asked)
    assert probed == sent, "what the probe sent counts"
    with scoring(vllm, tmp_path, price=2.0, budget=(2 * probed + 2.5 * n) * 2 / 1e6) as scorer:
        results = scorer.score([ScoreRequest(text_ids(), 5) for _ in range(4)])
        assert sum(bool(np.isnan(result.logprobs).all()) for result in results) == 2
        assert scorer.budget.tokens == 2 * probed + 2 * n <= scorer.budget.tokens + n
        with pytest.raises(BudgetSpent, match=r"0\.00\d+ spent of 0\.00\d+"):
            scorer.score([ScoreRequest(text_ids(), 5)])
    with pytest.raises(BudgetSpent), scoring(vllm, tmp_path, budget_tokens=2 * probed + 2 * n + 5):
        pass
    (tmp_path / "spent" / "teacher-0.json").write_text("{")
    with pytest.raises(EngineMismatch, match="how many tokens the run has sent"), scoring(vllm, tmp_path):
        pass


def test_a_reference_with_other_weights_is_refused(vllm: Api, tmp_path: Path) -> None:
    with scoring(vllm, tmp_path, reference=str(TEACHER_DIR)):
        pass
    with (
        pytest.raises(EngineMismatch, match="it serves other weights"),
        scoring(vllm, tmp_path, reference=str(STUDENT_DIR)),
    ):
        pass


def test_an_api_that_answers_otherwise_each_time_is_refused(vllm: Api, tmp_path: Path) -> None:
    drift = iter(range(1, 100))
    vllm.wrong = lambda reply: put(reply, 4, -1.0 * next(drift))
    with pytest.raises(EngineMismatch, match="changed by 1 nats"), scoring(vllm, tmp_path):
        pass


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_another_tokenizer_is_refused(kind: Kind, tmp_path: Path) -> None:
    """The ids are there, but mean other text."""
    with serving(Api(kind)) as api:
        decode = api.tokenizer.decode
        api.tokenizer.decode = lambda ids, **more: decode([(ids[0] + 1) % 300], **more)  # type: ignore[method-assign]
        with pytest.raises(EngineMismatch), scoring(api, tmp_path):
            pass


def test_text_that_has_other_tokens_is_masked_without_being_sent(tmp_path: Path) -> None:
    with serving(Api("together")) as api, scoring(api, tmp_path) as scorer:
        before = len(api.asked)
        (result,) = scorer.score([ScoreRequest(np.array([200, 201, 255, 202], np.int32), 1)])
        assert len(api.asked) == before and scorer.figures["api_unscored_tokens_total"] == 3
        assert np.isnan(result.logprobs).all()
        assert self_check(scorer, 300) is None


def test_an_api_that_puts_a_token_before_texts_gets_them_without(tmp_path: Path) -> None:
    with serving(Api("together", adds_bos=7)) as api, pytest.raises(EngineMismatch), scoring(api, tmp_path):
        pass
    folder = tmp_path / "begins with BOS"
    shutil.copytree(STUDENT_DIR, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    request = ScoreRequest(np.concatenate([np.array([bos], np.int32), text_ids()]), 5)
    with serving(Api("together", adds_bos=bos)) as api, scoring(api, tmp_path, folder=folder) as scorer:
        (result,) = scorer.score([request])
    assert result.logprobs == pytest.approx(expected(request).logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"url": "ftp://x/v1"}, "expected http"),
        ({"url": "https://user:pw@x/v1"}, "an address with a password"),
        ({"url": "https://x/v1?key=1"}, "got 'https://x/v1'"),
        ({"url": "http://example.com/v1"}, "expected https"),
        ({"url": "https://x/v1", "budget": 3.0}, "expected the price"),
        ({"model": "m"}, "model: got 'm' without api.url"),
    ],
)
def test_addresses_and_keys_that_cannot_be_used_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ApiConfig(**keys)


def test_budgets_are_one_number() -> None:
    config = ApiConfig(url="https://x/v1", price=0.5, budget=2.0, budget_tokens=5_000_000)
    assert config.most_tokens == 4_000_000 and ApiConfig(url="https://x/v1").most_tokens == math.inf
    assert msgspec.to_builtins(config)["url"] == "https://x/v1"
