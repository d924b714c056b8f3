"""The page of a run holds what the record has, token by token, and no text of it can become markup."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stillhouse.builtin import TEACHER_DIR
from stillhouse.protocol.messages import Branch
from stillhouse.protocol.payloads.aligned import NOT_SCORED
from stillhouse.protocol.payloads.hidden import encode_hidden
from stillhouse.tools.view.command import main
from stillhouse.tools.view.heads import Heads
from stillhouse.tools.view.rollouts import FoundRollout, choose
from tests.tools.view import made_record as made
from tests.tools.view.slow_reader import PageRead, Seen, recorded

HALF_STEP = 0.5 / 1024 + 1e-9


def page_of(run: Path, *arguments: str) -> PageRead:
    assert main([str(run), "--no-open", *arguments]) == 0
    return PageRead((run / "view.html").read_text(encoding="utf-8"))


def same_logprob(shown: float | None, expected: float | None) -> bool:
    if shown is None or expected is None:
        return shown is expected
    return abs(shown - max(expected, -65_533 / 1024)) <= HALF_STEP


def same(shown: Seen, expected: Seen) -> bool:
    pairs = list(zip(shown.tokens, expected.tokens, strict=True))
    return (
        (shown.id, shown.tag, shown.reward, shown.n_prompt)
        == (expected.id, expected.tag, expected.reward, expected.n_prompt)
        and all((a.id, a.version, a.trained) == (b.id, b.version, b.trained) for a, b in pairs)
        and all(same_logprob(a.student, b.student) for a, b in pairs)
        and all(len(a.teachers) == len(b.teachers) for a, b in pairs)
        and all(same_logprob(*both) for a, b in pairs for both in zip(a.teachers, b.teachers, strict=True))
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_as_a_reader_that_shares_no_code_finds_it_in_the_record(tmp_path: Path, seed: int) -> None:
    run = made.everything(tmp_path, seed)
    page, expected = page_of(run), recorded((run / "batches.record").read_bytes())
    assert page.n_rollouts == len(expected) == 8
    for index, (key, one) in enumerate(expected.items()):
        shown = page.rollout(index)
        assert same(shown, one), key
        assert page.columns["length"][index] == sum(token.version is not None for token in one.tokens)
        assert page.columns["trained"][index] == sum(token.trained is not None for token in one.tokens)
        gaps = [t.student - q for t in one.tokens if t.student is not None for q in t.teachers if q is not None]
        gap = page.columns["gap"][index]
        assert math.isclose(gap, sum(gaps) / len(gaps), abs_tol=1e-5) if gaps else math.isnan(gap)
        words = [made.WORDS[token.id] for token in one.tokens[: one.n_prompt]]
        assert page.data["prompts"]["texts"][page.columns["prompt"][index]] == " ".join(words)
    assert page.columns["flags"] == [0, 0, 0, 0, 2, 1, 0, 0]
    assert page.rollout(6).tokens[3].teachers == [0.0]
    assert any(token.version and token.teachers == [None] for token in expected["train-5-0-0"].tokens)


@pytest.mark.parametrize("aligned", [False, True])
def test_the_worst_tokens_are_those_with_the_largest_difference_and_what_the_teacher_would_have_written(
    tmp_path: Path, aligned: bool
) -> None:
    sets: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    two: dict[str, Any] = {"turns": ((15, 2), (14, 0)), "teachers": ("x", "y")}
    one = made.rollout(np.random.default_rng(3), "a", prompt=[7], **two, sets=sets, aligned=aligned)
    page = page_of(made.write_run(tmp_path, made.batch((0, 0), [one])))
    found = page.details(0)["worst"]
    sampled = [i for i in range(one.item.end) if one.arrays[2][i]]
    expected: list[tuple[int, int]] = []
    for teacher in range(2):
        scores = {i: float(one.arrays[3][teacher, i]) for i in sampled if one.arrays[3][teacher, i] != NOT_SCORED}
        assert len(scores) == (20 if aligned else 29)
        gaps = {i: float(one.arrays[1][i]) - q for i, q in scores.items()}
        expected += [(teacher, i) for i in sorted(gaps, key=lambda i: -gaps[i])[:8] if gaps[i] >= 0.1]
    assert [(teacher, at) for teacher, at, _ in found] == expected
    assert {(teacher, at > 16) for teacher, at in expected} == {(0, False), (0, True), (1, False), (1, True)}
    for teacher, at, others in found:
        if aligned and (teacher, at) not in sets:
            assert others is None
            continue
        ids, logprobs = sets[teacher, at]
        assert [page.piece(number) for number, _ in others] == [made.WORDS[i] for i in ids[:5]]
        assert np.allclose([value for _, value in others], logprobs[:5], atol=0.02)


def test_staleness_counts_the_way_over_the_checkpoint_that_a_learner_went_on_from(tmp_path: Path) -> None:
    """0.0 - 0.1 - 0.2 - 0.3 (left); 1.2 goes on from 0.2. A token of 0.3 trained by 1.4: 1 back, 2 on."""
    random = np.random.default_rng(0)
    rollouts = {
        (0, 0): made.rollout(random, "a", prompt=[7], task=0),
        (0, 1): made.rollout(random, "b", prompt=[7], version=0, task=1),
        (0, 2): made.rollout(random, "left", prompt=[7], version=2, task=2),
        (1, 2): made.rollout(random, "c", prompt=[7], version=1, task=2),
        (1, 3): made.rollout(random, "d", prompt=[7], version=3, epoch=0, task=3),
        (1, 4): made.rollout(random, "e", prompt=[7], version=3, epoch=1, task=4),
    }
    batches = [made.batch(version, [one]) for version, one in rollouts.items()]
    batches.insert(3, made.resumed((1, 2), (0, 2)))
    page = page_of(made.write_run(tmp_path, *batches))
    names = [page.details(i)["id"] for i in range(page.n_rollouts)]
    assert dict(zip(names, page.columns["staleness"], strict=True)) == {"a": 0, "b": 1, "c": 1, "d": 2, "e": 1}
    assert any("left out: 1 batch on a branch" in note for note in page.data["facts"]["notes"])


def test_no_text_of_a_run_becomes_markup_and_nothing_is_loaded(tmp_path: Path) -> None:
    run = made.everything(tmp_path)
    page = page_of(run)
    kinds = [script.get("type") for script in page.scripts]
    assert kinds == ["application/json", "application/octet-stream", None]
    assert page.links == []
    text = (run / "view.html").read_text(encoding="utf-8")
    assert "<img" not in text and text.count("<script") == text.count("</script") == 3
    assert made.HOSTILE[0] in page.data["pieces"]["texts"] and made.HOSTILE[0] in page.data["tag"]
    assert page.data["facts"]["run"] == made.HOSTILE[0]


def test_turns_branches_and_rewards_of_an_episode_are_there(tmp_path: Path) -> None:
    page = page_of(made.everything(tmp_path))
    details = page.details(3)
    assert details["branches"] == [[9, 5], [12, 0]] == [[b.start, b.follows] for b in (Branch(9, 5), Branch(12, 0))]
    assert details["turn_rewards"] == [[7, 0.25], [12, 0.75]]


def test_a_record_that_is_too_large_is_shown_in_whole_groups_over_the_whole_run_and_the_page_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    tasks = 150
    batches = [
        made.batch(
            (0, t),
            [made.rollout(random, f"{t}-{s}", prompt=[7], turns=((700, 0),), task=t, sample=s) for s in range(2)],
        )
        for t in range(tasks)
    ]
    run = made.write_run(tmp_path, *batches)
    page = page_of(run, "--max-mb", "1")
    shown = page.columns["task"]
    assert 1 < page.n_rollouts < 2 * tasks
    assert sorted(shown) == sorted(2 * list(dict.fromkeys(shown))), "a group is torn apart"
    assert (run / "view.html").stat().st_size < 1.3 * (1 << 20)
    steps = sorted(set(shown))
    gaps = [b - a for a, b in pairwise(steps)]
    assert steps[0] == 0 and tasks - steps[-1] <= max(gaps) and max(gaps) - min(gaps) <= 1, "not evenly over the run"
    sentence = f"this page shows {page.n_rollouts} of {2 * tasks} rollouts"
    assert page.data["facts"]["n_rollouts"] == 2 * tasks
    assert any(note.startswith(sentence) for note in page.data["facts"]["notes"])
    assert sentence in capsys.readouterr().out


def test_one_group_is_shown_even_if_it_is_larger_than_the_page_should_be() -> None:
    item = made.rollout(np.random.default_rng(0), "a", prompt=[7]).item
    found = [FoundRollout(item, False, [])]
    assert choose(found, 1) == found and choose([], 1) == []


def test_without_the_tokenizer_the_page_shows_ids_and_says_why(tmp_path: Path) -> None:
    run = made.everything(tmp_path)
    (tmp_path / "student" / "tokenizer.json").write_text(
        '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    page = page_of(run)
    assert page.piece(0).startswith("<") and page.piece(0)[1:-1].isdecimal()
    assert any("tokens are shown as ids" in note and "fingerprint" in note for note in page.data["facts"]["notes"])
    assert main([str(run), "--no-open", "--tokenizer", str(tmp_path / "student")]) == 2


def test_a_damaged_logprob_is_named_and_does_not_hide_the_others(tmp_path: Path) -> None:
    one = made.rollout(np.random.default_rng(0), "a", prompt=[7], turns=((4, 0),))
    mu = one.arrays[1].copy()
    mu[2], mu[3] = np.nan, -500.0
    run = made.write_run(tmp_path, made.batch((0, 0), [one._replace(arrays=(one.arrays[0], mu, *one.arrays[2:]))]))
    shown = [token.student for token in page_of(run).rollout(0).tokens]
    assert shown[0] is None and math.isnan(shown[2] or 0) and shown[3] == -65_533 / 1024
    assert same_logprob(shown[1], float(mu[1])) and same_logprob(shown[4], float(mu[4]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "got nothing, expected RUN"),
        (["nowhere"], "no run nowhere"),
        (["RUN", "--wrong"], "unknown flag --wrong"),
        (["RUN", "--max-mb", "0"], "--max-mb: got '0'"),
        (["RUN", "--record"], "--record: got nothing"),
        (["EMPTY"], "config.yaml cannot be read"),
        (["RUN", "--record", "missing.record"], "no file 'missing.record'"),
    ],
)
def test_mistakes_are_named_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"RUN": str(made.everything(tmp_path)), "EMPTY": str(tmp_path / "empty")}
    assert main([places.get(word, word) for word in arguments] + ["--no-open"]) == 2
    error = capsys.readouterr().err
    assert says in error and all(line.startswith("stillhouse: ") for line in error.splitlines())


def test_what_a_teacher_of_hidden_states_would_have_written_is_what_transformers_says() -> None:
    model = AutoModelForCausalLM.from_pretrained(TEACHER_DIR).eval()
    with torch.no_grad():
        out = model(torch.tensor([[5, 9, 3, 7]]), output_hidden_states=True)
    payload = encode_hidden(out.hidden_states[-1][0].bfloat16().view(torch.int16).numpy().view("<u2"))
    right = torch.log_softmax(out.logits[0, 2], dim=-1).numpy()
    for config in ({}, {"models": {"teacher": str(TEACHER_DIR)}}, {"pools": {"default": {"model": str(TEACHER_DIR)}}}):
        got = Heads(config).logprobs("default", payload, 2)
        assert got is not None and np.argmax(got) == np.argmax(right) and np.abs(got - right).max() < 0.1
    foreign = encode_hidden(np.zeros((1, 4), "<u2"))
    assert Heads({}).logprobs("default", foreign, 0) is None, "states of another width"
    assert Heads({"models": {"teacher": "/no/model"}}).logprobs("default", payload, 2) is None
    identity = encode_hidden(out.hidden_states[-1][0].bfloat16().view(torch.int16).numpy().view("<u2"), head=1)
    assert Heads({}).logprobs("default", identity, 2) is None, "states of another head"
