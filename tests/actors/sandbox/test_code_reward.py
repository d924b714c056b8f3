"""The reward `code`, held against the same programs run by a plain Python, and against programs that cheat."""
# ruff: noqa: E501 - programs in lines

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.actors.rewards import Answered, make_reward
from stillhouse.actors.rewards.base import Verdict
from stillhouse.actors.rewards.code import last_program, why_unreadable
from tests.patience import Limit

DOUBLE = "```python\nfor line in open(0):\n    print(int(line) * 2)\n```"
ADD = "So:\n```py\ndef add(a, b):\n    return a + b\n```\nThat is all."


def judged(response: str, tests: Any, **options: Any) -> Verdict:
    reward = make_reward("code", **{"isolation": "none", "time_limit_s": 1.0, **options})
    return asyncio.run(reward(Answered(response, row={"tests": tests})))


ASSERTS = {
    "assert_code": "\n\ndef test_one():\n    assert add(1, 2) == 3\n\ndef test_two():\n    assert add(0, 0) == 0"
}


@pytest.mark.parametrize(
    ("response", "row", "reward"),
    [
        (ADD, {"case_type": "assert", "test_cases": [{"assert_code": "assert add(1, 2) == 3"}, ASSERTS]}, 1.0),
        ("```\ndef add(a, b):\n    return 3\n```", {"case_type": "pytest", "test_cases": json.dumps([ASSERTS])}, 0.0),
        (DOUBLE, {"case_type": "input", "test_cases": '[{"stdin": "1\\n2", "expected_stdout": "2\\n4\\n"}]'}, 1.0),
        (DOUBLE, {"test_cases": [{"stdin": "1", "expected_stdout": "2"}, {"stdin": "2", "expected_stdout": "3"}]}, 0.0),
        (ADD, {"tests": ["assert add(1, 1) == 2"], "test_cases": "unread"}, 1.0),
        (ADD, {"case_type": "text", "test_cases": [ASSERTS]}, None),
        (ADD, {"test_cases": "[{"}, None),
        (ADD, {"test_cases": [{"stdin": "1"}]}, None),
        (ADD, {"test_cases": [{"stdin": "1", "expected_stdout": "2"}, ASSERTS]}, None),
        (ADD, {"test_cases": [ASSERTS, {"stdin": "1", "expected_stdout": "2"}]}, None),
    ],
)
def test_rows_of_roll_are_judged_as_they_come(response: str, row: dict[str, Any], reward: float | None) -> None:
    """Functions `test_...` are called, as its own worker does (code_sandbox_reward_worker.run_assert_tests)."""
    judge = make_reward("code", isolation="none", time_limit_s=1.0)
    verdict = asyncio.run(judge(Answered(response, row=row)))
    assert verdict.reward == reward
    assert (
        (reward is None)
        == bool(why_unreadable(Answered("", row=row)))
        == ("reward_unscored_tests_unreadable" in verdict.info)
    )


def test_statements_that_are_no_python_are_seen_before_a_run() -> None:
    broken = Answered("", row={"tests": ["assert add(1, 2) =="]})
    assert "no Python" in why_unreadable(broken) and not why_unreadable(broken, python="/opt/python4")
    assert not why_unreadable(Answered(""))
    assert not why_unreadable(Answered("", row={"cases": ["assert x"]}), column="cases")


@pytest.mark.parametrize(
    ("response", "tests", "reward", "counted"),
    [
        (DOUBLE, {"inputs": ["1\n2", "3"], "outputs": ["2\n4", "6"]}, 1.0, None),
        (DOUBLE, {"inputs": ["1", "2"], "outputs": ["2", "5"]}, 0.0, "code_wrong"),
        (DOUBLE, {"inputs": ["x"], "outputs": ["2"]}, 0.0, "code_error"),
        ("```\nprint('a  ')\nprint()\n```", {"inputs": [""], "outputs": ["a"]}, 1.0, None),
        ("```\nprint(' a')\n```", {"inputs": [""], "outputs": ["a"]}, 0.0, "code_wrong"),
        (ADD, ["assert add(1, 2) == 4"], 0.0, "code_wrong"),
        (ADD, ["assert add(1, 2) =="], None, "reward_unscored_tests_compare_objects"),
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
    slow = "```\nimport time\nbegun = time.process_time()\nwhile time.process_time() < begun + 0.15: pass\n```"
    assert judged(slow, {"inputs": [""], "outputs": [""]}, time_limit_s=0.5).reward == 1.0
    assert judged(slow, {"inputs": [""] * 9, "outputs": [""] * 9}, time_limit_s=0.5).info == {"code_time": 1.0}
    assert judged("```\nwhile True: pass\n```", ["pass"], time_limit_s=0.5).info == {"code_time": 1.0}


PROGRAMS = (
    "print(input())",
    "print(open(0).read().upper())",
    "import sys; print(len(sys.stdin.read()), end='')",
    "1/0",
)


@settings(max_examples=3, deadline=None)
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


SUMS = ["assert add(1, 2) == 3", "assert add(5, 7) == 12", "def check(f):\n    assert f(-1, 1) == 0", "check(add)"]
SAY = "import os, sys, json, builtins, gc, atexit, threading\n"
CHEATS = {
    "equals everything": "class Y:\n    def __eq__(self, o): return True\ndef add(a, b): return Y()",
    "a kind of int": "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return I(7)",
    "a kind of str": "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return S('')",
    "a class in place of the function": "class add:\n    def __init__(self, *a): pass\n    def __eq__(self, o): return True",
    "ends early": "import sys\nsys.exit(0)",
    "ends in a call": "import os\ndef add(a, b): os._exit(0)",
    "says that it passed": "import os\nos.write(1, b'passed 1.0 ok')\nos._exit(0)",
    "writes to every file descriptor": SAY + "for fd in range(1, 256):\n"
    "    try: os.write(fd, b'0\\ntrue\\n[\"is\", true, null]\\n' * 9)\n    except OSError: pass\nos._exit(0)",
    "its own assert": "import builtins\nbuiltins.AssertionError = type('Never', (BaseException,), {})\ndef add(a, b): return 4",
    "its own json": "import json\njson.loads = json.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 4",
    "its own exit": SAY
    + "sys.exit = os._exit = lambda *a: None\natexit.register(print, 'passed')\ndef add(a, b): return 4",
    "a thread that ends it": SAY + "threading.Thread(target=lambda: os._exit(0)).start()\ndef add(a, b): return 4",
    "reads its callers": SAY + "def add(a, b):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
    "        seen.append(repr(frame.f_locals) + repr(frame.f_globals)); frame = frame.f_back\n"
    "    import re; found = re.findall(r'add\\(%d, %d\\) == (-?\\d+)' % (a, b), ' '.join(seen))\n"
    "    return int(found[0]) if found else None",
    "looks through memory": SAY
    + "def add(a, b):\n    import re\n    seen = ' '.join(x for x in gc.get_objects() if type(x) is str)\n"
    "    seen +=  '.join(map(str, gc.get_objects()))\n"
    "    found = re.findall(r'add\\(%d, %d\\) == (-?\\d+)' % (a, b), seen)\n    return int(found[0]) if found else None",
    "reads arguments, environment and files": SAY + "import glob\ndef add(a, b):\n    seen = ''\n"
    "    for path in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ') + glob.glob('*'):\n"
    "        try: seen += open(path, errors='replace').read()\n        except OSError: pass\n"
    "    import re; found = re.findall(r'add\\(%d, %d\\) == (-?\\d+)' % (a, b), seen)\n"
    "    return int(found[0]) if found else None",
}
HONEST = {
    "a plain function, and names of the tests": ("def add(a, b): return a + b", ["import math", "assert math.isclose(add(0.1, 0.2), 0.3)", "total = add(1, 1)", "assert total == 2"]),
    "nested data": ("def nested(x): return {'a': (1, [x]), 2: {3}, b'z': None}", ["assert nested(7) == {'a': (1, [7]), 2: {3}, b'z': None}"]),
    "tuples are no lists": ("def pair(): return (1, 2)", ["assert pair() == (1, 2) and pair() != [1, 2]"]),
    "an iterator": ("def count(n):\n    yield from range(n)", ["assert list(count(3)) == [0, 1, 2]"]),
    "what it raises": ("def fails(): raise ValueError('no')", ["try:\n    fails()\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"]),
    "a class": ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
                "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
                ["s = Stack()", "s.push(3)", "s.push([4])", "assert len(s) == 2 and s.pop() == [4] and s.items == [3]"]),
    "a function that it is given": ("def apply(g, xs): return [g(x) for x in xs]", ["assert apply(lambda x: x + 1, [1, 2]) == [2, 3]"]),
    "a function that it returns": ("def adder(n): return lambda x: x + n", ["assert adder(2)(3) == 5"]),
    "an argument that it changes": ("def order(xs): xs.sort()", ["a = [3, 1, 2]", "order(a)", "assert a == [1, 2, 3]"]),
    "long numbers": ("def long(n): return 10 ** n", ["assert long(9000) == 10 ** 9000"]),
    "an object of the tests": ("def read(node): return node.value", ["class Node:\n    value = 5", "assert read(Node()) == 5"]),
}  # fmt: skip
ALONE = (
    (
        "import math\ndef half(x): return x / 2",
        ["assert math.isclose(half(1), 0.5)"],
    ),  # a module that the tests do not import
    ("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"]),  # a name of Python's own
)


FURTHER = ("a kind of int", "a kind of str", "ends in a call", "says that it passed", "its own assert", "its own exit")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in FURTHER)) for name in CHEATS])
def test_a_program_that_solves_nothing_is_not_paid(name: str) -> None:
    assert judged(f"```python\n{CHEATS[name]}\n```", SUMS).reward == 0.0


def test_what_a_program_returns_is_judged_as_data() -> None:
    def passes(program: str, tests: list[str]) -> bool:
        return judged(f"```\n{program}\n```", tests) == Verdict(1.0)

    together = (
        "\n".join(program for program, _ in HONEST.values()),
        [one for _, tests in HONEST.values() for one in tests],
    )
    wrong = [] if passes(*together) else [name for name in HONEST if not passes(*HONEST[name])]
    assert not wrong and all(passes(*one) for one in ALONE), wrong


def test_a_program_that_is_given_a_function_of_the_tests_reaches_nothing_else_there() -> None:
    program = (
        "```\ndef f(g):\n    names = g.link.ask(True, 'attribute', g.number, '__globals__', {'dict': []})[0]\n"
        "    names['__builtins__']['eval'](\"__import__('os')._exit(0)\")\n```"
    )
    assert judged(program, ["assert f(lambda x: x + 1) == 7"]).reward == 0.0


def test_names_of_python_are_pythons_where_the_tests_ask_for_another() -> None:
    program = "def f(x): return 0\ndef sorted(x): return [1]\ndef all(x): return True"
    tests = ["assert sorted(f(3)) == [1]", "assert all(f(x) == 1 for x in (1, 2))"]
    assert [judged(f"```\n{program}\n```", [test]).reward for test in tests] == [0.0, 0.0]


def test_two_objects_of_the_programs_own_are_not_compared() -> None:
    program = "```\nclass P:\n    def __eq__(self, other): return True\n```"
    assert judged(program, ["assert P() == P()"]).info["reward_unscored_tests_compare_objects"] == 1.0


@pytest.mark.parametrize("source", ["", "child"])
def test_a_program_that_was_killed_from_outside_is_not_wrong(source: str) -> None:
    """All of its sandbox, and the program alone, as the system does when memory is short."""
    slow = "```\nimport time\ntime.sleep(60)\n```"

    def kill(limit: Limit) -> None:
        while not limit.passed:
            found = [one for one in psutil.Process().children(recursive=True) if "supervise.py" in str(one.cmdline())]
            programs = [one for one in found if one.parent() in found]
            if programs:
                for one in programs if source else found:
                    one.kill()
                return

    reward = make_reward("code", isolation="none", time_limit_s=30.0)  # which tries a first program
    thread = threading.Thread(target=kill, args=(Limit(),))
    thread.start()
    verdict = asyncio.run(reward(Answered(slow, row={"tests": {"inputs": ["1"], "outputs": ["2"]}})))
    thread.join()
    assert (verdict.reward, verdict.info["reward_unscored_sandbox_lost"]) == (None, 1.0)
