"""The program that compares formulas, checks documents and verifies instructions, in a process of its own
(`actors.rewards.checkers`).

It reads a JSON object per line and writes one: `{"reward": 0.0 or 1.0}`, `{"unscored": REASON}`, or `{"error": TEXT}`.
It stands alone and imports nothing of ours, so that it starts quickly and knows no more than the text it gets. A check
runs on the main thread, where a signal can stop Python code that takes too long. Where C code does not let a signal
through, the system ends the process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

MEMORY_BYTES = 4 << 30
"""Address space. A power of a power would otherwise fill the machine's memory."""


PACKAGES = {"math": "math_verify", "json_schema": "jsonschema", "ifeval": "lm_eval"}


class TooHard(BaseException):
    """No Exception, because sympy catches those."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the actor's to answer; this process ends with its input
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.set_int_max_str_digits(4300)
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a package prints is no answer
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What is answered to a request. A request with nothing else only imports."""
    checks: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "math": same_mathematics,
        "json_schema": fits,
        "ifeval": follows,
    }
    try:
        importlib.import_module(PACKAGES[asked["check"]])  # outside the limit: sympy takes a second
        if asked["check"] == "ifeval":
            ifeval_verifiers()
    except ImportError as error:
        return {"error": f"the checking process cannot import {PACKAGES[asked['check']]}: {error}"}
    if len(asked) == 1:
        return {}
    try:
        with cpu_limit(asked["limit_s"]):
            return checks[asked["check"]](asked)
    except (TooHard, MemoryError, RecursionError):
        return {"reward": 0.0, "too_hard": True}
    except Exception:  # a fault of the package, or of a schema
        return {"unscored": "check_error"}


class cpu_limit:  # noqa: N801 - used like a function
    """Raises TooHard after so many seconds of computing. A second later the system ends the process."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        last_s = int(used.ru_utime + used.ru_stime + self._limit_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (last_s if hard < 0 else min(last_s, hard), hard))
        signal.signal(signal.SIGPROF, self._stop)
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))

    @staticmethod
    def _stop(*_: object) -> None:
        raise TooHard


def same_mathematics(asked: dict[str, Any]) -> dict[str, Any]:
    """Whether the response's last formula equals the ground truth, by math-verify. Without a response: whether the
    ground truth can be read."""
    package: Any = importlib.import_module("math_verify")
    try:
        expected: list[Any] = package.parse(_as_formula(asked["ground_truth"]), parsing_timeout=None)
    except TooHard:
        expected = []
    if not expected:
        return {"unscored": "ground_truth_unreadable"}
    if "response" not in asked:
        return {}
    given: list[Any] = package.parse(asked["response"], parsing_timeout=None)
    return {"reward": float(bool(given) and package.verify(expected, given, timeout_seconds=None))}


def _as_formula(text: str) -> str:
    """math-verify looks for formulas in a text; a ground truth often is one, unmarked."""
    return text if "$" in text or re.search(r"\\boxed|\\\(|\\\[", text) else f"${text}$"


FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def fits(asked: dict[str, Any]) -> dict[str, Any]:
    """Whether the response is a JSON document that fits the schema: as a whole, or in its last ``` block."""
    from jsonschema import validators
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    response: str = asked["response"]
    blocks = FENCED.findall(response)
    try:
        document = json.loads(blocks[-1] if blocks else response.strip(), parse_constant=_refuse)
    except ValueError:
        return {"reward": 0.0}
    schema: Any = asked["schema"]
    registry: Any = Registry()  # an empty one: nothing is fetched
    checker: Any = validators.validator_for(schema)(schema, registry=registry)
    try:
        return {"reward": float(checker.is_valid(document))}
    except Unresolvable:
        return {"unscored": "schema_reference"}


def ifeval_verifiers() -> Any:
    """lm-eval's module of IFEval alone. `lm_eval.tasks` would import the whole harness, and dozens of packages."""
    if "lm_eval.tasks" not in sys.modules:
        package: Any = importlib.import_module("lm_eval")
        tasks = ModuleType("lm_eval.tasks")
        tasks.__path__ = [f"{folder}/tasks" for folder in package.__path__]
        sys.modules["lm_eval.tasks"] = tasks
        os.environ["LOCAL_RANK"] = "1"  # else it downloads nltk's data where they are missing
        importlib.import_module("langdetect").DetectorFactory.seed = 0  # the same response, the same verdict
    return importlib.import_module("lm_eval.tasks.ifeval.utils")


def follows(asked: dict[str, Any]) -> dict[str, Any]:
    """Whether the response follows all instructions of its row; `loose`: or would without its first or last line, or
    asterisks. Without a response: why that cannot be judged."""
    utils = ifeval_verifiers()
    example = utils.InputExample(0, asked["instructions"], asked["prompt"], asked["arguments"])
    if "response" not in asked:
        return {"why": _why_no_instruction(utils, example)}
    judge = utils.test_instruction_following_loose if asked["loose"] else utils.test_instruction_following_strict
    found = judge(example, asked["response"]).follow_instruction_list
    return {"reward": float(all(found)), "info": {"ifeval_instructions": len(found), "ifeval_followed": sum(found)}}


def _why_no_instruction(utils: Any, example: Any) -> str:
    """The package takes random arguments where some are missing, so all must be there."""
    known = utils.instructions_registry.INSTRUCTION_DICT
    for name, arguments in zip(example.instruction_id_list, example.kwargs, strict=True):
        if name not in known:
            return f"got the instruction {name!r:.60}, expected one of IFEval"
        wanted, there = set(known[name](name).get_instruction_args_keys()), {k for k, v in arguments.items() if v}
        if wanted != there:
            return f"{name}: got the arguments {sorted(there)}, expected {sorted(wanted)}"
    try:
        utils.test_instruction_following_strict(example, "A text. It has two sentences.")
    except LookupError as error:
        if "punkt" not in str(error):
            raise
        return "it needs data of nltk: python -m nltk.downloader punkt_tab"
    except (ValueError, TypeError, AttributeError, re.error) as error:
        return f"lm-eval says {type(error).__name__}: {error}"[:200]
    return ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


if __name__ == "__main__":
    main()
