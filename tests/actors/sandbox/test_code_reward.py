"""The reward `code`, held against the same programs run by a plain Python, and against programs that cheat."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rewards import Answered, make_reward
from actors.rewards.base import Verdict
from actors.rewards.code import last_program

DOUBLE = "```python\nfor line in open(0):\n    print(int(line) * 2)\n```"
ADD = "So:\n```py\ndef add(a, b):\n    return a + b\n```\nThat is all."


def judged(response: str, tests: Any, **options: Any) -> Verdict:
    reward = make_reward("code", **{"isolation": "none", "time_limit_s": 1.0, **options})
    return asyncio.run(reward(Answered(response, row={"tests": tests})))


@pytest.mark.parametrize(
    ("response", "tests", "reward", "counted"),
    [
        (DOUBLE, {"inputs": ["1\n2", "3"], "outputs": ["2\n4", "6"]}, 1.0, None),
        (DOUBLE, {"inputs": ["1", "2"], "outputs": ["2", "5"]}, 0.0, "code_wrong"),
        (DOUBLE, {"inputs": ["x"], "outputs": ["2"]}, 0.0, "code_error"),
        ("```\nprint('a  ')\nprint()\n```", {"inputs": [""], "outputs": ["a"]}, 1.0, None),
        ("```\nprint(' a')\n```", {"inputs": [""], "outputs": ["a"]}, 0.0, "code_wrong"),
        (ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 1.0, None),
        (ADD, ["assert add(1, 2) == 4"], 0.0, "code_error"),
        ("```\nimport sys\nsys.exit(0)\n```", ["assert False"], 0.0, "code_wrong"),
        ("```\nimport os\nos._exit(0)\n```", ["assert False"], 0.0, "code_wrong"),
        ("```\nwhile True: pass\n```", ["pass"], 0.0, "code_time"),
        ("```\nx = [0] * 10**10\n```", ["pass"], 0.0, "code_error"),
        (f"```\n#{'x' * 2**18}\n```", ["pass"], 0.0, "code_long"),
        (ADD, ["#" * (2**18 - 1)] * 3, None, "reward_unscored_tests_unreadable"),
        (DOUBLE, {"inputs": ["1\ud800"], "outputs": ["\ud800"]}, 0.0, "code_error"),
        ("no program", ["pass"], 0.0, "code_missing"),
        ("```ruby\nputs 1\n```", ["pass"], 0.0, "code_missing"),
        (ADD, None, None, "reward_unscored_no_tests"),
        (ADD, [], None, "reward_unscored_tests_unreadable"),
        (ADD, [3], None, "reward_unscored_tests_unreadable"),
        (ADD, {"inputs": ["1"], "outputs": []}, None, "reward_unscored_tests_unreadable"),
        (ADD, {"inputs": ["1" * 2**20], "outputs": ["1"]}, None, "reward_unscored_tests_unreadable"),
    ],
)
def test_programs_are_judged_by_their_rows_cases(
    response: str, tests: Any, reward: float | None, counted: str | None
) -> None:
    verdict = judged(response, tests)
    assert verdict.reward == reward
    assert (counted is None and not verdict.info) or counted in verdict.info


def test_the_time_limit_is_for_all_cases_together() -> None:
    slow = "```\nimport time\nbegun = time.process_time()\nwhile time.process_time() < begun + 0.4: pass\n```"
    assert judged(slow, {"inputs": [""], "outputs": [""]}).reward == 1.0
    assert judged(slow, {"inputs": [""] * 9, "outputs": [""] * 9}).info == {"code_time": 1.0}


PROGRAMS = (
    "print(input())",
    "print(open(0).read().upper())",
    "import sys; print(len(sys.stdin.read()), end='')",
    "1/0",
)


@settings(max_examples=8, deadline=None)
@given(
    program=st.sampled_from(PROGRAMS),
    text=st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=20),
    expected=st.text(st.sampled_from("ab\n 1"), max_size=6),
)
def test_a_verdict_is_that_of_a_plain_python(program: str, text: str, expected: str) -> None:
    plain = subprocess.run([sys.executable, "-c", program], input=text.encode(), capture_output=True, check=False)
    for wanted in (plain.stdout.decode(), expected):
        same = [line.rstrip() for line in plain.stdout.decode().rstrip().split("\n")] == [
            line.rstrip() for line in wanted.rstrip().split("\n")
        ]
        verdict = judged(f"```python\n{program}\n```", {"inputs": [text], "outputs": [wanted]})
        assert verdict.reward == float(same and plain.returncode == 0)


def test_the_last_closed_block_of_python_is_the_program() -> None:
    assert last_program("```py\na\n```\n```\nb\n```\n```ruby\nc\n```") == "b\n"
    assert last_program("```python\na\n```\n```python\nnever closed") == "a\n"
    assert last_program("``` python\na\n```") is None
    assert last_program("  ```Python3  \n\n  ```") == "\n"


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="column: got '', expected the name of a column"):
        make_reward("code", isolation="none", column="")
    with pytest.raises(ValueError, match="expected one of bubblewrap, none"):
        make_reward("code", isolation="")
