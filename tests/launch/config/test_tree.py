"""Building a config tree from plain data, and the errors on the way."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from launch.config.tree import Key, build, field_docs, find_key, keys_of, merge, parse_text, put
from launch.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: float = 1e-3
    """Peak learning rate,
    reached after the warm-up."""
    mode: Literal["slow", "fast"] = "slow"
    """How."""
    tags: tuple[str, ...] = ()
    limit: int | None = None
    """None = no limit."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int = 10
    """Steps."""
    shuffle: bool = True
    learner: Inner = msgspec.field(default_factory=Inner)
    named: dict[str, Inner] = msgspec.field(default_factory=dict[str, Inner])


def mistakes(plain: dict[str, object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build(Outer, plain)
    return caught.value.mistakes


def test_values_land_in_the_tree_and_the_rest_has_its_default() -> None:
    built = build(Outer, {"steps": 3, "learner": {"lr": 1, "tags": ["a", "b"]}})
    assert built == Outer(steps=3, learner=Inner(lr=1.0, tags=("a", "b")))


@pytest.mark.parametrize(
    ("plain", "nearest"),
    [
        ({"stesp": 3}, "did you mean steps?"),
        ({"learner": {"lrr": 3}}, "did you mean learner.lr?"),
        ({"lr": 3}, "did you mean learner.lr?"),
        ({"learner": {"steps": 3}}, "did you mean steps?"),
        ({"qqqqqqqq": 3}, "--help lists all keys"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_valid_one_is_named(plain: dict[str, object], nearest: str) -> None:
    (mistake,) = mistakes(plain)
    assert "unknown key" in mistake
    assert mistake.endswith(nearest)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"steps": "many"}, "steps: got 'many' (str), expected int"),
        ({"learner": {"lr": True}}, "learner.lr: got True (bool), expected float"),
        ({"learner": {"mode": "fats"}}, "learner.mode: got 'fats' (str), expected one of slow, fast"),
        ({"learner": {"limit": "x"}}, "learner.limit: got 'x' (str), expected int or none"),
        ({"learner": 3}, "learner: got 3 (int), expected a table of keys learner.*"),
        ({"learner": {"lr": -1}}, "learner: lr must be positive, got -1.0"),
    ],
)
def test_a_wrong_value_is_refused_with_key_got_and_expected(plain: dict[str, object], message: str) -> None:
    assert mistakes(plain) == (message,)


def test_all_mistakes_are_told_at_once() -> None:
    told = mistakes({"stesp": 3, "steps": "x", "learner": {"lr": "y", "mod": "fast"}})
    assert [mistake.partition(":")[0] for mistake in told] == ["stesp", "steps", "learner.lr", "learner.mod"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "7", 7),
        ("shuffle", "false", False),
        ("learner.lr", "3e-4", 3e-4),
        ("learner.lr", "1", 1),
        ("learner.limit", "none", None),
        ("learner.limit", "4", 4),
        ("learner.tags", "a,b", ["a", "b"]),
        ("learner.tags", "[a, 'b c']", ["a", "b c"]),
        ("learner.mode", "fast", "fast"),
        ("named", "{x: {lr: 0.5}}", {"x": {"lr": 0.5}}),
        ("named.x.lr", "0.5", 0.5),
    ],
)
def test_command_line_words_are_read_by_the_type_of_their_key(name: str, text: str, value: object) -> None:
    key = find_key(Outer, name)
    assert key is not None
    assert parse_text(key, text) == value


def test_a_word_that_fits_no_reading_is_refused_with_the_expected_type() -> None:
    with pytest.raises(ConfigError, match=r"learner\.lr: got 'fast'.*expected float"):
        parse_text(Key("learner.lr", float, 0.1, ""), "fast")


def test_entries_of_a_dict_of_structs_are_keys_too() -> None:
    assert find_key(Outer, "named.calculator.limit") is not None
    assert find_key(Outer, "named.calculator.limits") is None
    assert find_key(Outer, "learner.lr.x") is None
    assert find_key(Outer, "named.calculator") is None


def test_every_leaf_is_listed_with_default_and_docstring_on_one_line() -> None:
    keys = {key.name: key for key in keys_of(Outer)}
    assert list(keys) == [
        "steps",
        "shuffle",
        "learner.lr",
        "learner.mode",
        "learner.tags",
        "learner.limit",
        "named",
    ]
    assert keys["learner.lr"].default == 1e-3
    assert keys["learner.lr"].doc == "Peak learning rate, reached after the warm-up."
    assert field_docs(Inner).keys() == {"lr", "mode", "limit"}


def test_put_and_merge_build_nested_tables() -> None:
    under: dict[str, object] = {"learner": {"lr": 1.0, "limit": 2}, "steps": 1}
    put(under, "learner.mode", "fast")
    assert merge(under, {"learner": {"limit": 3}}) == {"learner": {"lr": 1.0, "limit": 3, "mode": "fast"}, "steps": 1}
    with pytest.raises(ConfigError, match="steps: got 1, expected a table"):
        put(under, "steps.deep", 1)
