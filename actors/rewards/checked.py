"""The rewards `math`, `json_schema` and `ifeval`, whose checks run in processes beside the actor
(`actors.rewards.checkers`)."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from stillhouse.actors.rewards.base import Answered, Reward, Verdict, unscored
from stillhouse.actors.rewards.checkers import CHECKERS, CheckerLost
from stillhouse.actors.rewards.pattern import BoundedPattern, positive
from stillhouse.actors.row_options import row_may_set

_PLAIN: Final = re.compile(r"[\w.,+*/^()= -]*[0-9A-Za-z][\w.,+*/^()= -]*", re.ASCII)
"""Formulas that math-verify surely reads: as a text, if not otherwise."""
WAIT_S: Final = 10.0
"""Longest time for a free process, and again for its answer: what is computed is limited by `limit_s`, this is for a
machine that is busy."""


@row_may_set("answer_pattern")
def math_reward(answer_pattern: str | None = None, limit_s: float = 5.0) -> Reward:
    """1.0 if the last formula of the response equals the ground truth, by the package math-verify: 1/2 equals 0.5.
    `answer_pattern`: a regular expression with one group; its last match is the formula. `limit_s`: an answer that
    takes more computing is wrong, and counted."""
    _needs("math_verify", package="math-verify", extra="math-verify")  # imported in its process only: sympy is large
    found = None if answer_pattern is None else BoundedPattern(answer_pattern, 1.0, option="answer_pattern", groups=1)
    limit_s = positive("limit_s", limit_s)

    async def judged(answered: Answered) -> Verdict:
        if answered.ground_truth is None:
            return unscored("no_ground_truth")
        response: str | None = answered.response
        if found is not None:
            try:
                response = await found.last_group(answered.response)
            except TimeoutError:
                return unscored("pattern_timeout")
            if response is None:
                return Verdict(0.0)
            response = f"${response}$"
        return await _asked("math", limit_s, response=response, ground_truth=answered.ground_truth)

    return judged


def why_unreadable(answered: Answered, *, limit_s: float = 5.0, **_: Any) -> str:
    """Why math-verify cannot read the ground truth; empty: it can, or there is none. Raises RuntimeError without the
    package."""
    expected = answered.ground_truth
    return "" if expected is None or _PLAIN.fullmatch(expected) else _why_no_formula(expected, limit_s)


math_reward.why_unreadable = why_unreadable  # pyright: ignore[reportFunctionMemberAccess]


@functools.lru_cache(maxsize=1 << 16)
def _why_no_formula(expected: str, limit_s: float) -> str:
    got = f"ground_truth: got {expected!r:.80}, expected one formula or number that math-verify can read"
    if expected[:1] in ("[", "{") and _texts_or_nothing(expected):
        return f"{got}, not a list of texts"
    try:
        answer = CHECKERS.ask({"check": "math", "limit_s": limit_s, "ground_truth": expected}, wait_s=limit_s + WAIT_S)
    except CheckerLost as lost:
        return f"{got} within limit_s = {limit_s:g}" if lost.too_hard else ""  # a busy machine says nothing
    return got if answer.get("unscored") == "ground_truth_unreadable" else ""


def _texts_or_nothing(expected: str) -> bool:
    """Whether it is the JSON of a list of texts, of an object, or of one that is empty: what a table gives in place of
    an answer."""
    try:
        value: object = json.loads(expected)
    except (ValueError, RecursionError):
        return False
    match value:
        case [*values]:
            return not values or any(isinstance(one, str) for one in values)
        case _:
            return isinstance(value, dict)


@row_may_set("schema")
def json_schema_reward(schema: Mapping[str, Any] | bool, limit_s: float = 5.0) -> Reward:
    """1.0 if the response is JSON that fits `schema`: as a whole, or in its last ``` block. References to other
    documents are not fetched."""
    _needs("jsonschema", package="jsonschema", extra="json-schema")
    package: Any = importlib.import_module("jsonschema")
    if not isinstance(schema, Mapping | bool):  # pyright: ignore[reportUnnecessaryIsInstance] - from a configuration
        raise ValueError(f"schema: got {schema!r:.60}, expected a JSON schema: a table")
    try:
        package.validators.validator_for(schema).check_schema(schema)
    except package.exceptions.SchemaError as error:
        raise ValueError(f"schema: not a JSON schema, at {error.json_path}: {error.message:.200}") from error
    limit_s = positive("limit_s", limit_s)

    async def judged(answered: Answered) -> Verdict:
        return await _asked("json_schema", limit_s, response=answered.response, schema=schema)

    return judged


@row_may_set()
def ifeval_reward(loose: bool = False, limit_s: float = 5.0) -> Reward:
    """1.0 if the response follows all instructions of its row (columns `instruction_id_list` and `kwargs`), by the
    verifiers of IFEval (arXiv 2311.07911) in the package lm-eval. `loose`: or if it would without its first or last
    line, or without asterisks. How many instructions there were, and were followed, is counted too."""
    if lacking := _lacking_for_ifeval():
        raise ValueError(f"it needs {', '.join(lacking)}: pip install 'lm_eval[ifeval]' (docs/rewards.md#ifeval)")
    if loose not in (True, False):
        raise ValueError(f"loose: got {loose!r}, expected true or false")
    limit_s = positive("limit_s", limit_s)

    async def judged(answered: Answered) -> Verdict:
        request = _instructions(answered)
        if isinstance(request, str):
            return unscored("instructions_unreadable") if request else unscored("no_instructions")
        return await _asked("ifeval", limit_s, response=answered.response, loose=loose, **request)

    return judged


IFEVAL_MODULES: Final = ("lm_eval", "langdetect", "immutabledict", "nltk")


def why_no_instructions(answered: Answered, *, limit_s: float = 5.0, **_: Any) -> str:
    """Why the verifiers cannot read the row; empty: they can, there are no instructions, or the package is not here."""
    request = _instructions(answered)
    if isinstance(request, str):
        return request
    if _lacking_for_ifeval():
        return ""
    try:
        return CHECKERS.ask({"check": "ifeval", "limit_s": limit_s, **request}, wait_s=limit_s + WAIT_S).get("why", "")
    except CheckerLost:
        return ""  # a busy machine says nothing
    except RuntimeError as error:  # the package cannot be imported
        return str(error)


ifeval_reward.why_unreadable = why_no_instructions  # pyright: ignore[reportFunctionMemberAccess]


def _lacking_for_ifeval() -> list[str]:
    return [module for module in IFEVAL_MODULES if importlib.util.find_spec(module) is None]


def _instructions(answered: Answered) -> dict[str, Any] | str:
    """What the verifiers are asked of a row; or why not, empty where it has no instructions."""
    names, arguments = (answered.row.get(column) for column in ("instruction_id_list", "kwargs"))
    match names, arguments:
        case (None | [], _):
            return ""
        case ([*_], [*_]) if len(names) == len(arguments):
            pass
        case _:
            return f"got instruction_id_list {names!r:.60} and kwargs {arguments!r:.60}, expected lists of one length"
    if not all(isinstance(name, str) for name in names) or not all(isinstance(one, dict) for one in arguments):
        return f"got instruction_id_list {names!r:.60} and kwargs {arguments!r:.60}, expected texts and objects"
    return {"instructions": names, "arguments": arguments, "prompt": answered.prompt}


def _needs(module: str, *, package: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"it needs the package {package}: pip install -e '.[{extra}]'")


async def _asked(check: str, limit_s: float, **request: Any) -> Verdict:
    try:
        answer = await asyncio.to_thread(
            CHECKERS.ask, {"check": check, "limit_s": limit_s, **request}, wait_s=limit_s + WAIT_S
        )
    except CheckerLost as lost:
        return Verdict(0.0, {"reward_too_hard": 1.0}) if lost.too_hard else unscored(lost.reason)
    if "unscored" in answer:
        return unscored(answer["unscored"])
    return Verdict(
        answer["reward"], answer.get("info", {}) | ({"reward_too_hard": 1.0} if "too_hard" in answer else {})
    )
