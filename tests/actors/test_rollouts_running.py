"""Rollouts between ticket and last segment: phases in order, and whatever goes wrong ends one rollout, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.envs.registry import UnknownEnvironment
from stillhouse.actors.rollouts_running import MAX_NAMES
from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.base import Int32s, ScoreRequest
from stillhouse.engines.config import EngineConfig, ScorerSettings
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import RolloutFailed, Sampling, Segment, VersionSpan
from stillhouse.protocol.printable import in_one_line
from tests.actors.in_hand import BREAKABLE, STOP, V0, V1, V2, Breakable, InHand, ScriptedEngine, ids_of, ticket
from tests.patience import PATIENCE_S

PROMPT = ids_of(1, 2, 3)
Prompt = Callable[[str], Int32s]


def config(**options: Any) -> ActorConfig:
    """Segments of 4 tokens; `env` is Breakable with these options; no pause after failures to speak of."""
    timeout_s = 0.2 if options.get("hang") or options.get("block") else PATIENCE_S
    env = EnvConfig(name=BREAKABLE, options=options, step_timeout_s=timeout_s, max_turns=4)
    fine = EnvConfig(name=BREAKABLE, max_turns=4)
    return ActorConfig(segment_tokens=4, environments={"env": env, "fine": fine})


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def in_hand(engine: ScriptedEngine, tokenizer: TextTokenizer) -> Iterator[Callable[..., InHand]]:
    """Build the rollouts of one actor around the scripted engine."""
    made: list[InHand] = []
    Breakable.closed.clear()
    Breakable.let_go.clear()

    def make(**options: Any) -> InHand:
        made.append(InHand(engine, tokenizer, config(**options)))
        return made[-1]

    yield make
    Breakable.let_go.set()
    for hand in made:
        hand.environments.close()


def generating(hand: InHand, n: int = 1) -> None:
    hand.until(lambda: hand.rollouts.generating == n)


# --------------------------------------------------------------------------------------------------------- phases


def test_a_rollout_goes_from_its_environment_to_the_engine_and_back_until_it_is_done(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(env="env"), PROMPT)
    assert (len(hand.rollouts), hand.rollouts.waiting_for_weights, engine.requests) == (1, 1, {})
    generating(hand)
    assert hand.rollouts.waiting_for_weights == 0
    (first,) = engine.requests.values()
    assert (first.prompt_ids.tolist(), first.max_new_tokens, first.stop_token_ids) == ([1, 2, 3], 40, (STOP,))
    engine.say(first.request_id, 4, 5)
    engine.say(first.request_id, 6, STOP, end="stop")
    hand.until(lambda: bool(engine.requests.keys() - {first.request_id}))
    (second,) = engine.requests.values()
    assert second.prompt_ids.tolist() == [1, 2, 3, 4, 5, 6, STOP, 8]
    assert (second.max_new_tokens, second.sample_offset) == (36, 4)
    engine.version = V1
    engine.say(second.request_id, 9, STOP, end="stop")
    hand.until_gone()
    segments, ids, logprobs, mask = hand.whole("train-0-0-0")
    assert ids.tolist() == [1, 2, 3, 4, 5, 6, STOP, 8, 9, STOP]
    assert mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 1, 1]
    assert logprobs.tolist() == [-0.5 * m for m in mask.tolist()]
    assert [span for s in segments for span in s.spans] == [VersionSpan(V0, 3, 7), VersionSpan(V1, 8, 10)]
    last = segments[-1]
    assert (last.finish_reason, last.reward, last.n_turns) == ("stop", 1.0, 2)
    assert (hand.failures, list(Breakable.closed)) == ({}, ["train-0-0-0"])
    assert (hand.rollouts.counts["rollouts_finished_total"], hand.rollouts.counts["env_turns_total"]) == (1, 1)


def test_an_environment_reads_its_row_and_makes_a_prompt_from_it(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(env="env", row=b'{"prompt_ids": [40, 41, 42, 43], "reply_ids": [44]}'), PROMPT)
    generating(hand)
    (request,) = engine.requests.values()
    assert request.prompt_ids.tolist() == [40, 41, 42, 43, 44]
    engine.say(request.request_id, 9, STOP, end="stop")
    hand.until_gone()
    segments, ids, _, mask = hand.whole("train-0-0-0")
    assert ids.tolist() == [40, 41, 42, 43, 44, 9, STOP] and mask.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert segments[0].own_prompt_tokens == 5


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"prompt_ids": []}', "env_error (EnvironmentFault): Breakable.reset gave a prompt without tokens"),
        (b'{"prompt_ids": [-1]}', "env_error (EnvironmentFault): Breakable.reset gave token ids -1 to -1"),
        (b'{"prompt_ids": ' + b"[" + b"7," * 300 + b"7]}", "engine_refused"),
        (b"[1]", "engine_refused: Expected `object`, got `array`"),
    ],
)
def test_a_row_or_a_prompt_that_is_none_fails_one_rollout(
    in_hand: Callable[..., InHand], engine: ScriptedEngine, row: bytes, reason: str
) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(0, env="env", row=row), PROMPT)
    hand.rollouts.add(ticket(1, env="env"), PROMPT)
    hand.until(lambda: hand.rollouts.generating == 1 and len(hand.rollouts) == 1)
    assert list(hand.failures) == ["train-0-0-0"] and hand.failures["train-0-0-0"].startswith(reason)


def test_segments_leave_while_the_rollout_is_under_way(in_hand: Callable[..., InHand], engine: ScriptedEngine) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(env="env"), PROMPT)
    generating(hand)
    (request_id,) = engine.requests
    engine.say(request_id, *range(20, 29))
    hand.until(lambda: len(hand.sent) == 2)
    assert [(s.start, s.end, s.final) for s in hand.messages(Segment)] == [(0, 7, False), (7, 11, False)]
    assert hand.rollouts.generating == 1


def test_what_is_sampled_leaves_early_where_a_batch_is_about_to_and_evaluations_wait(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(0, env="env"), PROMPT)
    hand.rollouts.add(ticket(1, env="env", kind="eval"), PROMPT)
    generating(hand, 2)
    for request_id in list(engine.requests):
        engine.say(request_id, 20, 21, 22)
    hand.turn()
    assert hand.messages(Segment) == []
    hand.rollouts.send_early()
    hand.rollouts.send_early()
    (early,) = hand.messages(Segment)
    assert (early.rollout_id, early.start, early.end, early.final) == ("train-0-0-0", 0, 5, False)
    assert hand.rollouts.counts["segments_total"] == 1
    for request_id in list(engine.requests):
        engine.say(request_id, 9, STOP, end="stop")
    hand.until_gone()
    segments, ids, _, _ = hand.whole("train-0-0-0")
    assert ids.tolist() == [1, 2, 3, 20, 21, 22, 9, STOP]
    assert [(s.start, s.end) for s in segments] == [(0, 5), (5, 7), (7, 8)]


def test_tickets_start_in_order_once_their_weights_are_here(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    """The third could start at once, but would take the turn of the second, which is nearer to its deadline."""
    hand = in_hand()
    for number, version in enumerate((V0, V1, V0, V2)):
        hand.rollouts.add(ticket(number, env="env", min_version=version), PROMPT)
    started: list[list[str]] = []
    for engine.version, n in ((V0, 1), (V1, 3), (V2, 4)):
        generating(hand, n)
        hand.turn()
        assert hand.rollouts.waiting_for_weights == 4 - n
        started.append(sorted(request_id.split("-")[1] for request_id in engine.requests))
    assert started == [["0"], ["0", "1", "2"], ["0", "1", "2", "3"]]


def test_the_last_turn_is_the_one_that_used_the_tokens_up(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(env="env", sampling=Sampling(max_new_tokens=2)), PROMPT)
    generating(hand)
    (request_id,) = engine.requests
    engine.say(request_id, 4, 5, end="length")
    hand.until_gone()
    segments, ids, _, _ = hand.whole("train-0-0-0")
    assert (segments[-1].finish_reason, segments[-1].reward, ids.tolist()) == ("length", 1.0, [1, 2, 3, 4, 5])


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", sorted(Breakable.ERRORS))
@pytest.mark.parametrize("at", ["new", "reset", "step"])
def test_an_environment_that_raises_fails_its_own_rollout_by_name(
    in_hand: Callable[..., InHand], engine: ScriptedEngine, at: str, error: str
) -> None:
    hand = in_hand(at=at, error=error)
    hand.rollouts.add(ticket(0, env="env"), PROMPT)
    hand.rollouts.add(ticket(1, env="fine"), PROMPT)
    generating(hand, 2 if at == "step" else 1)
    for request_id in list(engine.requests):
        engine.say(request_id, 9, STOP, end="stop")
    hand.until_gone()
    assert hand.failures.keys() == {"train-0-0-0"}
    told = hand.failures["train-0-0-0"]
    assert told.startswith(f"env_error ({error}): {in_one_line(str(Breakable.ERRORS[error]))} (at in_hand.py:")
    assert hand.whole("train-1-0-0")[0][-1].finish_reason == "stop"
    assert sorted(Breakable.closed) == (["train-1-0-0"] if at == "new" else ["train-0-0-0", "train-1-0-0"])


def test_texts_of_an_environment_reach_nobody_raw_or_at_full_length(
    in_hand: Callable[..., InHand], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(
        Breakable.ERRORS, "hostile", ValueError("x\n12:00:00 actor-0 ERROR forged\x1b[2J" + "y" * 10**5)
    )
    hand = in_hand(at="reset", error="hostile")
    hand.rollouts.add(ticket(env="env"), PROMPT)
    hand.until_gone()
    (failed,) = hand.messages(RolloutFailed)
    assert (failed.reason, failed.error) == ("env_error", "ValueError")
    assert failed.detail.isprintable() and len(failed.detail) < 500
    assert failed.detail.startswith(r"x\n12:00:00 actor-0 ERROR forged\x1b[2J")
    assert all(len(message.splitlines()) == 1 and message.isprintable() for message in caplog.messages)


def test_an_environment_that_breaks_when_it_is_closed_spoils_nothing(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand(at="close", error="OSError")
    hand.rollouts.add(ticket(env="env"), PROMPT)
    generating(hand)
    (request_id,) = engine.requests
    engine.say(request_id, 9, STOP, end="stop")
    hand.until_gone()
    assert hand.failures == {} and hand.whole("train-0-0-0")[0][-1].final


@pytest.mark.parametrize("at", ["reset", "step"])
def test_an_environment_that_does_not_answer_in_time_fails_its_rollout(
    in_hand: Callable[..., InHand], engine: ScriptedEngine, at: str
) -> None:
    hand = in_hand(at=at, hang=True)
    hand.rollouts.add(ticket(env="env"), PROMPT)
    if at == "step":
        generating(hand)
        (request_id,) = engine.requests
        engine.say(request_id, 4, STOP, end="stop")
    hand.until_gone()
    assert hand.failures == {"train-0-0-0": f"env_timeout: {at} took longer than 0.2 s"}
    assert list(Breakable.closed) == ["train-0-0-0"]


@pytest.mark.parametrize("at", ["reset", "step"])
def test_an_environment_that_blocks_fails_its_own_rollouts_while_others_go_on(
    in_hand: Callable[..., InHand], engine: ScriptedEngine, at: str
) -> None:
    """As with `time.sleep(10**6)`. Its threads are left behind, and close their environments if they come back."""
    hand = in_hand(at=at, block=True)
    for number in range(3):
        hand.rollouts.add(ticket(number, env="env"), PROMPT)
    hand.rollouts.add(ticket(3, env="fine"), PROMPT)
    generating(hand, 4 if at == "step" else 1)
    for request_id in list(engine.requests):
        engine.say(request_id, 9, STOP, end="stop")
    hand.until(lambda: not len(hand.rollouts))
    assert hand.failures.keys() == {f"train-{number}-0-0" for number in range(3)}
    for told in hand.failures.values():
        assert told.startswith(f"env_timeout: {at} has blocked its thread for 0.2 s, at in_hand.py:")
    assert hand.whole("train-3-0-0")[0][-1].finish_reason == "stop"
    assert hand.environments.stuck == 3
    Breakable.let_go.set()
    hand.until_gone()
    assert sorted(Breakable.closed) == [f"train-{number}-0-0" for number in range(4)]


def test_no_rollout_starts_without_room_for_its_thread(
    engine: ScriptedEngine, tokenizer: TextTokenizer, in_hand: Callable[..., InHand]
) -> None:
    in_hand()
    hand = InHand(engine, tokenizer, config(), max_threads=2)
    for number in range(3):
        hand.rollouts.add(ticket(number, env="env"), PROMPT)
    generating(hand, 2)
    hand.turn()
    assert hand.rollouts.waiting_for_weights == 1
    hand.rollouts.cancel("train-0-0-0", "not wanted")
    hand.until(lambda: "train-2-0-0/0" in engine.requests)
    hand.environments.close()


@pytest.mark.parametrize("name", ["singel_turn", "calculator", "this:x", "builtins:exit", "antigravity:x\n"])
def test_a_ticket_may_name_only_an_environment_of_the_configuration(in_hand: Callable[..., InHand], name: str) -> None:
    """The ticket comes from the wire: what else it names is neither run nor imported."""
    for module in ("this", "antigravity"):
        sys.modules.pop(module, None)
    hand = in_hand()
    hand.rollouts.add(ticket(env=name), PROMPT)
    hand.until_gone()
    (failed,) = hand.messages(RolloutFailed)
    assert failed.reason == "env_unknown" and repr(in_one_line(name)) in failed.detail
    assert failed.detail.endswith("expected one of single_turn, env, fine")
    assert not {"this", "antigravity"} & sys.modules.keys()


def test_the_environment_of_the_tasks_is_imported_before_any_ticket_comes(
    engine: ScriptedEngine, tokenizer: TextTokenizer
) -> None:
    with pytest.raises(UnknownEnvironment, match="did you mean 'single_turn'"):
        InHand(engine, tokenizer, config(), task_env="singel_turn")


def test_names_of_an_environments_numbers_are_bounded(in_hand: Callable[..., InHand]) -> None:
    hand = in_hand()
    for i in range(10 * MAX_NAMES):
        hand.rollouts.counts[hand.rollouts._info_key(f"name{i}")] += 1.0  # pyright: ignore[reportPrivateUsage]
    assert len(hand.rollouts.counts) == MAX_NAMES + 1
    assert hand.rollouts.counts["env_other_total"] == 9 * MAX_NAMES


@pytest.mark.parametrize("end", ["error", "aborted"])
def test_an_engine_that_gives_up_a_request_fails_its_rollout(
    in_hand: Callable[..., InHand], engine: ScriptedEngine, end: str
) -> None:
    hand = in_hand()
    for number in range(2):
        hand.rollouts.add(ticket(number, env="env"), PROMPT)
    generating(hand, 2)
    engine.say("train-0-0-0/0", 4, end=end, error="out of memory")
    engine.say("train-1-0-0/0", 9, STOP, end="stop")
    hand.until_gone()
    assert hand.failures == {"train-0-0-0": f"engine_{end}: out of memory"}
    assert [message.error for message in hand.messages(RolloutFailed)] == [""]
    assert hand.whole("train-1-0-0")[0][-1].final and len(Breakable.closed) == 2


def test_a_request_that_the_engine_refuses_fails_its_rollout(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand()
    engine.refuse = ValueError("token id 999 outside the vocabulary")
    hand.rollouts.add(ticket(env="env"), PROMPT)
    hand.until_gone()
    assert hand.failures == {"train-0-0-0": "engine_refused: token id 999 outside the vocabulary"}


def test_a_prompt_that_fills_the_context_fails_its_rollout(in_hand: Callable[..., InHand]) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(env="env"), np.zeros(200, np.int32))
    hand.until_gone()
    assert "a prompt of 200 tokens fills the context of 200" in hand.failures["train-0-0-0"]


# ----------------------------------------------------------------------------------------------------- cancellation


def test_a_rollout_cancelled_while_it_waits_is_never_started(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand()
    for number in range(2):
        hand.rollouts.add(ticket(number, env="env", min_version=V1), PROMPT)
    hand.rollouts.cancel("train-0-0-0", "not wanted")
    assert hand.rollouts.waiting_for_weights == len(hand.rollouts) == 1
    engine.version = V1
    generating(hand)
    assert list(engine.requests) == ["train-1-0-0/0"]


def test_a_rollout_cancelled_while_it_is_sampled_says_nothing_more(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand()
    hand.rollouts.add(ticket(env="env"), PROMPT)
    generating(hand)
    engine.say("train-0-0-0/0", *range(20, 28))
    hand.rollouts.cancel("train-0-0-0", "not wanted")
    assert (engine.aborted, len(hand.rollouts), hand.rollouts.generating) == (["train-0-0-0/0"], 0, 0)
    hand.until_gone()
    assert hand.sent == [] and list(Breakable.closed) == ["train-0-0-0"]


def test_a_rollout_cancelled_while_its_environment_is_at_work_says_nothing_more(
    in_hand: Callable[..., InHand], engine: ScriptedEngine
) -> None:
    hand = in_hand(at="step", hang=True)
    hand.rollouts.add(ticket(env="env"), PROMPT)
    generating(hand)
    engine.say("train-0-0-0/0", 4, STOP, end="stop")
    hand.until(lambda: hand.rollouts.generating == 0)
    hand.rollouts.cancel("train-0-0-0", "not wanted")
    assert len(hand.rollouts) == 0 and engine.aborted == []
    hand.until_gone()
    assert (hand.failures, hand.messages(Segment), list(Breakable.closed)) == ({}, [], ["train-0-0-0"])


def test_cancelling_what_is_not_there_changes_nothing(in_hand: Callable[..., InHand]) -> None:
    """It may have ended while the message was on its way."""
    hand = in_hand()
    hand.rollouts.add(ticket(env="env"), PROMPT)
    generating(hand)
    hand.rollouts.cancel("train-9-0-0", "not wanted")
    assert hand.rollouts.generating == 1 and hand.sent == []


# ------------------------------------------------------------------------------------------- with the real student


@pytest.fixture(scope="module")
def student() -> Iterator[TorchEngine]:
    model = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="sdpa")
    engine = TorchEngine(model, EngineConfig(max_concurrent=8, max_context=200, device="cpu"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def scorer() -> TorchScorer:
    return TorchScorer.load(STUDENT_DIR, ScorerSettings(device="cpu"))


@pytest.fixture
def rendered(hf_tokenizer: PreTrainedTokenizerBase) -> Prompt:
    def render(text: str) -> Int32s:
        turns = [{"role": "user", "content": text}]
        text = cast(str, cast(Any, hf_tokenizer).apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        return np.asarray(hf_tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    return render


def assert_scored_alike(hand: InHand, scorer: TorchScorer, rollout_id: str) -> tuple[list[Segment], Int32s]:
    """The behaviour log-prob of every sampled token is that of a full recompute; other tokens have none."""
    segments, ids, logprobs, mask = hand.whole(rollout_id)
    expected = np.concatenate([[0.0], scorer.score([ScoreRequest(ids, 1)])[0].logprobs])
    np.testing.assert_allclose(logprobs, np.where(mask, expected, 0.0), atol=1e-4)
    covered = np.zeros(len(ids), bool)
    for segment in segments:
        for span in segment.spans:
            assert segment.start <= span.start < span.end <= segment.end
            covered[span.start : span.end] = True
    assert covered[mask.astype(bool)].all()
    return segments, ids


def test_calculator_rollouts_of_the_student_take_turns(
    student: TorchEngine, scorer: TorchScorer, tokenizer: TextTokenizer, rendered: Prompt
) -> None:
    hand = InHand(student, tokenizer, ActorConfig(segment_tokens=8), task_env="calculator")
    prompt = rendered("calc: 289+923+75=")
    for number in range(4):
        hand.rollouts.add(ticket(number, env="calculator", sampling=Sampling(seed=number)), prompt)
    hand.until_gone()
    hand.environments.close()
    assert hand.failures == {}
    calls = 0
    for number in range(4):
        rollout_id = f"train-{number}-0-0"
        segments, ids = assert_scored_alike(hand, scorer, rollout_id)
        _, _, _, mask = hand.whole(rollout_id)
        written = ids[len(prompt) :][~mask[len(prompt) :].astype(bool)]
        results = tokenizer.decode(written).count("<result>")
        assert segments[-1].n_turns == results + 1
        calls += results
    assert calls >= 2, "the built-in student uses its calculator"
    assert hand.rollouts.counts["env_calculator_calls_total"] == calls
