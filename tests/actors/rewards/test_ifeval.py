"""The reward `ifeval`. Its judge is lm-eval's own code, where that is installed; CI has it not. Rows are our own, in
the shape of IFEval's."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.rewards import Answered, Verdict, checked, make_reward, registry
from stillhouse.actors.rewards.checkers import CHECKERS
from stillhouse.launch.checks.reward_rows import unreadable_rows
from stillhouse.launch.run import main
from tests.known_sets import write_known_set

INSTALLED = all(find_spec(module) for module in checked.IFEVAL_MODULES)
installed = pytest.mark.skipif(not INSTALLED, reason="pip install 'lm_eval[ifeval]' installs what this needs")
Row = dict[str, Any]


def row(*instructions: tuple[str, Row], prompt: str = "Say something.") -> Row:
    names, arguments = zip(*instructions, strict=True)
    return {"key": 1, "prompt": prompt, "instruction_id_list": [*names], "kwargs": [*arguments]}


WORDS = ("length_constraints:number_words", {"relation": "at least", "num_words": 6})
NO_COMMA = ("punctuation:no_comma", dict[str, Any]())
ROWS = [
    row(NO_COMMA, WORDS),
    row(("detectable_format:title", {}), ("startend:end_checker", {"end_phrase": "The end."})),
    row(("detectable_format:json_format", {}), ("keywords:forbidden_words", {"forbidden_words": ["rock", "field"]})),
    row(("change_case:english_lowercase", {}), ("keywords:existence", {"keywords": ["vote", "friend"]})),
    row(("change_case:english_capital", {}), ("startend:quotation", {})),
    row(("detectable_format:number_bullet_lists", {"num_bullets": 2})),
    row(("detectable_format:number_highlighted_sections", {"num_highlights": 2})),
    row(("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2})),
    row(("keywords:letter_frequency", {"let_relation": "less than", "letter": "e", "let_frequency": 4})),
    row(("keywords:frequency", {"relation": "at least", "keyword": "friend", "frequency": 2})),
    row(("length_constraints:number_paragraphs", {"num_paragraphs": 2}), NO_COMMA),
    row(
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "vote"},
        )
    ),
    row(("detectable_content:number_placeholders", {"num_placeholders": 1})),
    row(("detectable_content:postscript", {"postscript_marker": "P.S."})),
    row(("detectable_format:constrained_response", {})),
    row(("combination:two_responses", {}), NO_COMMA),
    row(("combination:repeat_prompt", {"prompt_to_repeat": "Say something."})),
    row(("language:response_language", {"language": "de"})),
]
LINES = [
    *("Here is your answer:", "Dear friend, go and vote.", "dear friend go and vote with your friend", "<<A title>>"),
    *("* one\n* two", "*one* and *two*", "SECTION 1\na\nSECTION 2\nb", "", "***", "******", "P.S. write to [name]"),
    *('{"a": 1}', "```json\n{}\n```", '"LOUD AND IN CAPITAL LETTERS"', "My answer is yes.", "Say something."),
    *("Das ist ein deutscher Satz über das Wetter in Berlin.", "The end.", "vote", "rock", "\n\nvote for it\n\n"),
]


def responses(n: int) -> list[str]:
    chosen = random.Random(0)
    return LINES + ["\n".join(chosen.sample(LINES, chosen.randint(1, 4))) for _ in range(n)]


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    CHECKERS.close()


@pytest.fixture(scope="module")
def utils(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """lm-eval's verifiers in this process, with a stand-in for nltk's data: an untrained model of English sentences."""
    nltk: Any = importlib.import_module("nltk")
    punkt: Any = importlib.import_module("nltk.tokenize.punkt")
    folder = tmp_path_factory.mktemp("nltk")
    (folder / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True)
    before, nltk.data.path[:] = [*nltk.data.path], [str(folder)]
    punkt.save_punkt_params(punkt.PunktParameters(), str(folder / "tokenizers" / "punkt_tab" / "english"))
    package: Any = importlib.import_module("lm_eval")
    tasks = ModuleType("lm_eval.tasks")
    tasks.__path__ = [f"{path}/tasks" for path in package.__path__]
    sys.modules["lm_eval.tasks"] = tasks
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    yield importlib.import_module("lm_eval.tasks.ifeval.utils")
    nltk.data.path[:] = before
    del sys.modules["lm_eval.tasks"]


def judged(response: str, one: Row, **options: Any) -> Verdict:
    return asyncio.run(make_reward("ifeval", **options)(Answered(response, None, one["prompt"], one)))


def same_as_the_package(utils: Any, rows: list[Row], texts: list[str]) -> list[float]:
    rewards: list[float] = []
    for loose in (False, True):
        judge = utils.test_instruction_following_loose if loose else utils.test_instruction_following_strict
        for one in rows:
            example = utils.InputExample(one["key"], one["instruction_id_list"], one["prompt"], one["kwargs"])
            for text in texts:
                expected = judge(example, text)
                followed = expected.follow_instruction_list
                assert judged(text, one, loose=loose) == Verdict(
                    float(expected.follow_all_instructions),
                    {"ifeval_instructions": len(followed), "ifeval_followed": sum(followed)},
                ), (one, text, loose)
                rewards.append(float(expected.follow_all_instructions))
    return rewards


@installed
def test_verdicts_are_those_of_the_package_strict_and_loose(utils: Any) -> None:
    rewards = same_as_the_package(utils, ROWS, responses(12))
    assert 100 < sum(rewards) < len(rewards) - 100


@installed
def test_all_kinds_of_instructions_are_tried(utils: Any) -> None:
    tried = {name for one in (*ROWS, *WITH_DATA) for name in one["instruction_id_list"]}
    assert tried == set(utils.instructions_registry.INSTRUCTION_DICT)


WITH_DATA = [
    row(("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 3})),
    row(("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2})),
]


@installed
def test_instructions_that_need_nltks_data_are_refused_without_and_judged_with_them(
    utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHECKERS.close()
    for one in WITH_DATA:
        assert checked.why_no_instructions(Answered("", row=one)) == (
            "it needs data of nltk: python -m nltk.downloader punkt_tab"
        )
    nltk: Any = importlib.import_module("nltk")
    monkeypatch.setenv("NLTK_DATA", nltk.data.path[0])
    CHECKERS.close()
    assert [checked.why_no_instructions(Answered("", row=one)) for one in WITH_DATA] == ["", ""]
    rewards = same_as_the_package(utils, WITH_DATA, ["One. Two.", "One. Two. Three.", "A LOUD one", "Quiet"])
    assert 0 < sum(rewards) < len(rewards)
    CHECKERS.close()


@installed
@pytest.mark.parametrize(
    ("one", "why"),
    [
        (row(("keywords:existance", {})), "got the instruction 'keywords:existance', expected one of IFEval"),
        (
            row(NO_COMMA, ("length_constraints:number_words", {"num_words": 3})),
            "number_words: got the arguments ['num_words'], expected ['num_words', 'relation']",
        ),
        (row(("punctuation:no_comma", {"relation": "x"})), "got the arguments ['relation'], expected []"),
        (
            row(("length_constraints:number_words", {"num_words": 3, "relation": "at most"})),
            "lm-eval says ValueError: The supported relation",
        ),
        (row(("keywords:existence", {"keywords": ["(("]})), "lm-eval says"),
    ],
)
def test_a_row_that_the_verifiers_cannot_read_says_why(one: Row, why: str) -> None:
    assert why in checked.why_no_instructions(Answered("", row=one))


@installed
def test_rows_are_read_before_a_run_starts(tmp_path: Path) -> None:
    assert all(not checked.why_no_instructions(Answered("", row=one)) for one in ROWS)
    path = write_known_set("google/IFEval", tmp_path)
    environments = {"single_turn": EnvConfig(name="single_turn", options={"reward": "ifeval"})}
    assert unreadable_rows("p", f"hf:{path}", environments, {}) == ([], [])
    file = path / "train.jsonl"
    file.write_text(file.read_text().replace("at least", "not below"))
    (mistake,) = unreadable_rows("p", f"hf:{path}", environments, {}).mistakes
    assert "1 of 1 rows have values that their reward cannot read, the first: " in mistake
    assert "line 1: lm-eval says ValueError" in mistake


def test_lists_that_do_not_fit_need_no_package() -> None:
    for names, arguments in ((["a"], []), ("a", [{}]), ([1], [{}]), (["a"], ["{}"]), (["a"], None)):
        why = checked.why_no_instructions(Answered("", row={"instruction_id_list": names, "kwargs": arguments}))
        assert why.startswith("got instruction_id_list")
    assert checked.why_no_instructions(Answered("", row={"prompt": "no instructions"})) == ""


@installed
def test_what_cannot_be_judged_is_unscored_and_what_computes_for_ever_is_wrong() -> None:
    assert judged("x", {"prompt": ""}).info["reward_unscored_no_instructions"] == 1.0
    assert judged("x", row(NO_COMMA) | {"kwargs": []}).info["reward_unscored_instructions_unreadable"] == 1.0
    endless = row(("keywords:existence", {"keywords": ["(a|a|aa)+$"]}))
    assert judged("a" * 60 + "b", endless, limit_s=0.3) == Verdict(0.0, {"reward_too_hard": 1.0})
    assert judged("x", row(NO_COMMA)).reward == 1.0


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checked, "IFEVAL_MODULES", ("no_such_module",))
    registry._shared.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_known_set("google/IFEval", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["--learner.eval_sets.ifeval.prompts=hf:google/IFEval", "--check"]) == 2
    said = capsys.readouterr().err
    assert "reward 'ifeval': it needs no_such_module: pip install 'lm_eval[ifeval]'" in said
