"""The commands in README.md, docs/ and examples/ can be typed as they stand, from the repository's root."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest

from stillhouse.launch.cluster import COMMANDS
from stillhouse.launch.config.command_line import parse_arguments
from stillhouse.launch.config.help import USAGE
from stillhouse.launch.errors import ConfigError
from tests.declared_figures import undeclared
from tests.release import SHORT

ROOT = Path(__file__).parent.parent
TYPED = (*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "agents").glob("*.md")))
DOCS = (ROOT / "README.md", *TYPED, *sorted((ROOT / "examples").rglob("*.toml")))
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
ROOMS = [ROOT / "src", *(link.resolve() for link in (ROOT / "src" / "stillhouse").iterdir() if link.is_symlink())]
PROGRAMS = re.compile(r"(?<![\w/.-])(?P<program>[\w/.-]*(?:python3?|tensorboard))(?= (?:-m |--logdir))")
COMMAND = re.compile(r"(?:\.venv/bin/stillhouse|python launch/cluster\.py)\b(?P<rest>[^`\n#]*)")
MEASUREMENT = re.compile(
    r"python (?:-m bench\.(?P<module>[\w.]+)|bench/)(?P<rest>[^`\n]*)(?P<old>`[^`|\n]{0,20}\b(?:old|commit)\b)?"
)
"""A command that prints a figure. `old`: its script is in an earlier commit."""


def words(rest: str) -> list[str]:
    """The arguments, without what a table or a sentence puts behind them."""
    return shlex.split(rest.split("  ")[0].split(" |")[0].rstrip(" ,.;:)\\"))


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_programs_are_those_of_the_environment_that_make_venv_makes(file: Path) -> None:
    used = {found["program"] for found in PROGRAMS.finditer(file.read_text(encoding="utf-8"))}
    assert used <= {".venv/bin/python", ".venv/bin/tensorboard"}


@functools.cache
def help_of(command: str) -> str:
    """What `stillhouse COMMAND --help` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        importlib.import_module(f"stillhouse.{COMMANDS[command]}").main(["--help"])
    return said.getvalue()


def refuse_unknown(rest: str) -> None:
    """Raise for a command that does not exist, and for a flag that is neither its own nor a key."""
    arguments = words(rest)
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    if command is None:
        parse_arguments(arguments)
        return
    for word in arguments[1:]:
        name = word.partition("=")[0]
        if name.startswith("--") and not re.search(rf"{re.escape(name)}(?![\w-])", help_of(command)):
            parse_arguments([name, "1"])


def test_commands_and_their_flags_are_known() -> None:
    checked = 0
    for file in DOCS:
        for found in COMMAND.finditer(file.read_text(encoding="utf-8").replace("\\\n", " ")):
            if "[" not in found["rest"]:
                refuse_unknown(found["rest"])
                checked += 1
    assert checked >= 60, "the documents' commands were not found"


def wrong_measurements(text: str) -> list[str]:
    """Commands of bench/ that do not start as they stand, or have a flag that the program does not know."""
    wrong: list[str] = []
    for found in MEASUREMENT.finditer(text):
        file = ROOT / "bench" / f"{(found['module'] or 'none').replace('.', '/')}.py"
        known = file.read_text(encoding="utf-8") if file.exists() else ""
        flags = re.findall(r"(?<= )--[a-z-]+", found["rest"].partition(" #")[0])
        if (
            not found["old"]
            and "# at that commit" not in found["rest"]
            and (not known or any(f'"{flag}"' not in known for flag in flags))
        ):
            wrong.append(found[0])
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_measurements_start(page: Path) -> None:
    assert wrong_measurements(page.read_text(encoding="utf-8").replace("\\\n", " ")) == []


@pytest.mark.parametrize("wrong", ["bench/role_cpu.py", "-m bench.roles", "-m bench.role_cpu --actor 3"])
def test_a_measurement_that_cannot_be_typed_is_seen(wrong: str) -> None:
    assert wrong_measurements(f"`python {wrong}` prints it.")


@pytest.mark.parametrize(
    "wrong",
    [
        "doctr --student DIR",
        "--actrs 32",
        "join RUN --actrs 8",
        "view latest --liv",
        "try calculator --m 2",
        "audit RUN --all",
    ],
)
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises(ConfigError):
        refuse_unknown(f" {wrong}")


def test_targets_of_make_and_scripts_that_a_page_lets_one_type_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    checked = 0
    for file in DOCS:
        for line in file.read_text(encoding="utf-8").splitlines():
            for target in re.findall(r"(?:^|`)make ([a-z][\w.-]*)", line):
                assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"make {target}: {file.name}"
                checked += 1
            for script in re.findall(r"\.venv/bin/python (?:-m )?((?:bench|scripts|examples)[\w/.]+)", line):
                there = script if script.endswith(".py") else script.replace(".", "/") + ".py"
                assert (ROOT / there).is_file() or MEASUREMENTS in line, f"{there}: {file.name}"
                checked += 1
    assert checked >= 20, "the documents' targets and scripts were not found"


def test_the_tour_names_private_functions_that_are_in_the_files_it_names() -> None:
    checked = 0
    for line in (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").splitlines():
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in re.findall(r"`([\w/]+\.py)`", line))
        for name in re.findall(r"`(?:\w+\.)?(_\w+)`", line) if text else ():
            assert re.search(rf"\b{name}\b", text) or f".{name}`" in line, f"{name} is not there: {line}"
            checked += 1
    assert checked >= 10, "the tour's functions were not found"


def test_the_tests_that_hold_the_promises_and_those_of_ci_are_there() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    named = [found.removeprefix("tests/") for found in re.findall(r"`(tests/[\w/.:]+)`", page)]
    for name in (*named, *SHORT):
        path, _, function = name.partition("::")
        files = [file for file in (ROOT / "tests").glob(f"{path}*") if file.is_dir() or file.suffix == ".py"]
        assert files, f"tests/{path} is not there"
        begins = rf"def {re.escape(function.split('[')[0].split('::')[-1])}"
        assert not function or re.search(begins, files[0].read_text(encoding="utf-8")), f"tests/{name} is not there"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_subcommand(command: str) -> None:
    assert f"stillhouse {command} " in USAGE


def test_a_figure_that_is_not_declared_is_noticed() -> None:
    """Runs are compared with it in tests/integration/test_whole_run.py and test_replay.py."""
    assert undeclared(["train/loss", "masked/stale_total", "train/loss_of_another", "new/figure"]) == [
        "new/figure",
        "train/loss_of_another",
    ]


MEASUREMENTS = "`8a3131da`"
NAMED = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|toml|md|txt))(?::\w+)?`|\]\(([\w./-]+\.(?:md|toml|py))(?:#[\w-]*)?\)")


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(file: Path) -> None:
    """From the top folder, from the page's own, or from tests/. The changelog names what was, and a measurement whose
    script is gone names the commit that has it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    text = "\n".join(re.sub("`bench/[^`]*`", "", line) if MEASUREMENTS in line else line for line in lines)
    named = {name for pair in NAMED.findall(text) for name in pair if name}
    folders = (ROOT, file.parent, ROOT / "tests")
    assert sorted(name for name in named if not any((folder / name).exists() for folder in folders)) == []


LINK = re.compile(r"\]\((?P<page>[\w./-]*\.md)?#(?P<anchor>[\w-]+)\)")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_headings_that_a_page_links_to_are_there(file: Path) -> None:
    links = [(found["page"], found["anchor"]) for found in LINK.finditer(file.read_text(encoding="utf-8"))]
    pages = [(file.parent / page if page else file, anchor) for page, anchor in links]
    assert [(page.name, anchor) for page, anchor in pages if anchor not in anchors(page)] == []


DECISIONS = sorted(file for file in (ROOT / "docs" / "decisions").glob("*.md") if file.name != "README.md")


@pytest.mark.parametrize("file", DECISIONS, ids=lambda file: file.stem)
def test_each_decision_has_a_date_a_status_and_a_link_from_the_code_that_it_explains(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert re.search(r"^Date: \d{4}-\d\d-\d\d\. Status: (accepted|replaced by \[.+\]\(.+\))\.$", text, re.MULTILINE)
    link = f"docs/decisions/{file.name}"
    assert f"({file.name})" in (file.parent / "README.md").read_text(encoding="utf-8")
    assert any(link in code.read_text(encoding="utf-8") for room in ROOMS for code in room.rglob("*.py")), link
