"""Building a config tree from plain data, and the errors on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

import msgspec
import pytest

from stillhouse.launch.config.keys import Key, field_docs, find_key, keys_of, parse_text
from stillhouse.launch.config.tree import Plain, build, choose, lacking, merge, put
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.settings import Member, Members, PositiveFloat, Settings, Share


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
        ({"qqqqqqqq": 3}, "--help all lists the keys"),
        ({"stops_at": 3}, "stops_at: unknown key; --help all lists the keys"),  # nothing is near enough
        ({"run_dir": "x"}, "run_dir: unknown key; it is a flag of the command line: --run-dir"),
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


class Hot(Member, frozen=True, kw_only=True):
    name: str = "hot"
    degrees: PositiveFloat = 90.0
    """How hot."""
    cap: Annotated[int, msgspec.Meta(ge=1, le=9)] = 3


class Cold(Member, frozen=True, kw_only=True):
    name: str = "cold"
    cap: Annotated[int, msgspec.Meta(ge=1, le=9)] = 5


class Water(Members):
    """Two that are built in, and one that is found only where its options have to be known."""

    def known(self) -> Mapping[str, type[Settings]]:
        return {"plain": Member, "hot": Hot, "cold": Cold}

    def section(self, name: str, *, with_options: bool) -> type[Settings]:
        if name == "far:away":
            return Hot if with_options else Member
        if name not in self.known():
            raise ValueError(f"got {name!r}, expected one of plain, hot, cold")
        return self.known()[name]


WATER = Water()


class Bath(Settings, frozen=True, kw_only=True):
    water: Annotated[Member, WATER] = Hot()
    """What is in it."""
    taps: Annotated[dict[str, Settings], WATER] = msgspec.field(default_factory=dict[str, Settings])
    depth: Share = 0.5


class House(Settings, frozen=True, kw_only=True):
    bath: Bath = Bath()


def wrong(plain: dict[str, object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build(House, plain)
    return caught.value.mistakes


@pytest.mark.parametrize(
    ("water", "expected"),
    [
        ("plain", Member(name="plain")),
        ("cold", Cold()),
        ({"name": "cold", "cap": 2}, Cold(cap=2)),
        ({"degrees": 50}, Hot(degrees=50.0)),
        ("far:away", Member(name="far:away")),
        ({"name": "far:away", "cap": 2}, Hot(name="far:away", cap=2)),
    ],
)
def test_a_name_chooses_the_shape_of_its_section(water: object, expected: Member) -> None:
    built = build(House, {"bath": {"water": water}})
    assert built.bath.water == expected
    assert type(built.bath.water) is type(expected)
    assert build(House, cast("dict[str, object]", msgspec.to_builtins(built))) == built


def test_a_table_of_sections_has_the_shape_of_each_name() -> None:
    built = build(House, {"bath": {"taps": {"hot": {"degrees": 40.0}, "cold": {}}}})
    assert built.bath.taps == {"hot": Hot(degrees=40.0), "cold": Cold()}
    assert find_key(House, "bath.taps.cold.cap") is not None


@pytest.mark.parametrize(
    ("bath", "message"),
    [
        ({"water": "steam"}, "bath.water: got 'steam', expected one of plain, hot, cold"),
        ({"water": 3}, "bath.water: got 3 (int), expected one of plain, hot, cold"),
        ({"water": {"name": 3}}, "bath.water: got 3 (int), expected one of plain, hot, cold"),
        (
            {"water": {"name": "cold", "degrees": 9.0}},
            "bath.water.degrees: cold does not read it, expected one of its options: cap; degrees is an option of hot",
        ),
        (
            {"water": {"name": "plain", "cap": 2}},
            "bath.water.cap: plain does not read it, expected no option; cap is an option of hot, cold",
        ),
        (
            {"water": {"name": "hot", "degree": 9.0}},
            "bath.water.degree: hot does not read it, expected one of its options: cap, degrees",
        ),
        ({"water": {"degrees": 0.0}}, "bath.water.degrees: got 0.0 (float), expected float > 0"),
        ({"water": {"cap": 10}}, "bath.water.cap: got 10 (int), expected int >= 1 and <= 9"),
        ({"water": {"degrees": float("inf")}}, "bath.water.degrees: got inf, expected float > 0"),
        ({"taps": {"steam": {}}}, "bath.taps.steam: got 'steam', expected one of plain, hot, cold"),
        ({"taps": {"hot": 3}}, "bath.taps.hot: got 3 (int), expected a table of keys"),
        ({"depth": 1.5}, "bath.depth: got 1.5 (float), expected float >= 0 and <= 1"),
    ],
)
def test_an_option_that_the_chosen_member_does_not_read_is_refused(bath: dict[str, object], message: str) -> None:
    assert wrong({"bath": bath}) == (message,)


@pytest.mark.parametrize(
    ("under", "over", "merged"),
    [
        ({"name": "hot", "cap": 2}, "cold", {"name": "cold"}),
        ({"name": "hot", "cap": 2}, {"degrees": 5}, {"name": "hot", "cap": 2, "degrees": 5}),
        ({"cap": 2}, {"name": "hot"}, {"name": "hot", "cap": 2}),
        ({"cap": 2}, {"name": "cold", "cap": 1}, {"name": "cold", "cap": 1}),
        (None, "cold", {"name": "cold"}),
        ("cold", {"cap": 1}, {"name": "cold", "cap": 1}),
    ],
)
def test_another_name_laid_over_leaves_no_option_of_the_former(under: object, over: object, merged: object) -> None:
    below: dict[str, object] = {"bath": {"water": under}} if under is not None else {}
    assert merge(below, {"bath": {"water": over}}, House) == {"bath": {"water": merged}}


def test_the_name_is_a_key_and_so_is_every_option_of_every_member() -> None:
    name, capped = find_key(House, "bath.water"), find_key(House, "bath.water.cap")
    assert name is not None and name == find_key(House, "bath.water.name") and name.members is not None
    assert capped is not None and parse_text(capped, "4") == 4
    unknown = find_key(House, "bath.water.anything")
    assert unknown is not None and parse_text(unknown, "4.5") == 4.5
    plain: Plain = {"bath": {"water": {"name": "hot", "cap": 2}}}
    choose(plain, name, "hot")
    assert plain == {"bath": {"water": {"name": "hot", "cap": 2}}}
    choose(plain, name, "cold")
    assert plain == {"bath": {"water": {"name": "cold"}}}


def test_a_tree_in_full_says_the_options_of_its_members() -> None:
    full = cast("dict[str, object]", msgspec.to_builtins(House(bath=Bath(taps={"cold": Cold()}))))
    assert lacking(House, full) == []
    bath = cast("dict[str, dict[str, object]]", full["bath"])
    del bath["water"]["cap"], bath["taps"]["cold"]
    assert lacking(House, full) == ["bath.water.cap"]


def test_a_range_in_a_type_holds_for_a_call_too() -> None:
    for section in (Hot, Bath):
        assert section()
    with pytest.raises(ValueError, match=r"degrees: got -1\.0, expected float > 0"):
        Hot(degrees=-1.0)
    with pytest.raises(ValueError, match="depth: got nan, expected float >= 0 and <= 1"):
        Bath(depth=float("nan"))
