"""Every command of README.md and docs/cluster.md, of --help and of the examples is typed by a test on this machine.

`TYPED` says how: with `--check` added, as it stands, or by the test that is named. What must run does, in
tests/integration/test_typed_commands.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from stillhouse import builtin
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.cluster import COMMANDS
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.render.command import main as render
from stillhouse.launch.run import main
from tests.test_docs import COMMAND, ROOT, words

PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "cluster.md")
SMOLLM2: Final = ROOT / "examples" / "smollm2" / "model"
CHECKED, AS_IT_STANDS = "with --check", "as it stands"
RUNS: Final = "tests/integration/test_typed_commands.py"
ON_RAY: Final = "tests/launch/ray/test_on_ray.py"
TYPED: Final = {
    "": CHECKED,
    "--help": AS_IT_STANDS,
    "--actors 6 --teachers 2": CHECKED,
    "--actors 32 --teachers 8": RUNS,
    "--check --student DIR --teacher DIR --prompts FILE.jsonl --learner.lr 1e-5": AS_IT_STANDS,
    "doctor --student DIR --teacher DIR --prompts FILE.jsonl --learner.lr 1e-5": "tests/tools/doctor/test_command.py",
    "--student DIR --teacher DIR --prompts FILE.jsonl --learner.lr 1e-5": CHECKED,
    "--config examples/smollm2/context.toml": CHECKED,
    "--actor.engine sglang --teacher.engine sglang --device cpu --actors 4 --teachers 2": CHECKED,
    "--check --device cuda --gpus 8 --actors 6": AS_IT_STANDS,
    "--backend ray --name big --config topology.toml": ON_RAY,
    "--backend ray --steps 20 --actors 8 --teachers 2 --cluster.learner.cpus 1 --cluster.learner.memory_gib 2 "
    "--cluster.actors.each 8 --cluster.actors.cpus 1 --cluster.actors.memory_gib 2": RUNS,
    "doctor": "tests/tools/doctor/test_command.py",
    "join RUN --actors 8": "tests/integration/test_join.py",
    "audit RUN": RUNS,
    "view RUN": RUNS,
    "view latest": RUNS,
    "export latest --to FOLDER": "tests/tools/export/test_export.py",
    "render slurm --run-dir /shared/runs/big --config topology.toml": AS_IT_STANDS,
    "render k8s --name big --private big-private --config topology.toml --cluster.image registry/stillhouse:1 "
    "--actor.engine torch --teacher.engine torch": AS_IT_STANDS,
}
NEEDS: Final = {
    "smollm2": (SMOLLM2 / "config.json").is_file(),
    "sglang": (ROOT / ".venv-sglang").is_dir(),
}
"""Word of a command -> whether this machine has what it names."""
EXAMPLES: Final = [
    example
    for example in sorted((ROOT / "examples").rglob("*.toml"))
    # Those for published models on GPUs are planned with stand-ins: tests/launch/test_recipes.py.
    if "HAS NOT BEEN RUN HERE" not in example.read_text(encoding="utf-8")
]
NEEDS_MORE: Final = {
    "off_policy": "no file '.*teacher.record'",
    "seq_kd": "seq_kd is for learner.offline.divergence and stillhouse replay",
    "specialists": "no folder 'build/specialists/student'",
}
"""Examples whose own text says what to type before, or instead -> what the launcher says otherwise."""


def commands() -> Iterator[str]:
    for page in PAGES:
        for found in COMMAND.finditer(re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))):
            yield " ".join(words(found["rest"].split(" > ")[0]))


def test_every_command_of_the_pages_is_typed() -> None:
    found = set(commands())
    assert found - TYPED.keys() == set(), "say in TYPED how this command is typed"
    assert len(found) >= 15
    for place in set(TYPED.values()) - {CHECKED, AS_IT_STANDS}:
        assert (ROOT / place).is_file()


def test_the_projects_own_command_is_accepted() -> None:
    """By what every start checks. It runs in tests/integration/test_typed_commands.py."""
    checked = check(resolve_config(parse_arguments(["--actors", "32", "--teachers", "8", "--device", "cpu"])))
    (memory,) = checked.servers.memory
    assert "actor-0 to actor-31" in memory and "teacher-0 to teacher-7" in memory


def test_help_describes_every_command_with_words_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of its usage are the commands; the flags of an example are the keys that --help explains."""
    for typed in (["--help"], ["--help", "learner"], ["--help", "learner.lr"], ["--help", "all"]):
        assert main(typed) == 0
    said = capsys.readouterr().out
    assert set(re.findall(r"^ +stillhouse ([\w-]+)", said, re.MULTILINE)) == COMMANDS.keys()


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The words of a command, with the files that the page describes."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    topology = next(text for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "# topology.toml" in text)
    (tmp_path / "topology.toml").write_text(topology, encoding="utf-8")
    names = {
        "DIR": str(builtin.STUDENT_DIR),
        "FILE.jsonl": str(ROOT / "examples/smollm2/questions.jsonl"),
        "topology.toml": str(tmp_path / "topology.toml"),
        "/shared/runs/big": str(tmp_path / "runs" / "big"),
        "big-private": str(tmp_path / "big-private"),
    }

    def make(command: str) -> list[str]:
        for word, there in NEEDS.items():
            if word in command and not there:
                pytest.skip(f"this machine lacks what {word} names")
        return [names.get(word, word) for word in command.split()]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command, how in TYPED.items() if how in (CHECKED, AS_IT_STANDS)])
def test_a_command_of_the_pages(
    typed: Callable[[str], list[str]], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = typed(command)
    if given[:1] == ["render"]:
        assert render(given[1:]) == 0, capsys.readouterr().err
        assert "join" in capsys.readouterr().out
        return
    given += ["--check"] * (TYPED[command] == CHECKED)
    assert main(given) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert command == "--help" or "nothing was started" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_is_accepted_as_it_is_typed(
    typed: Callable[[str], list[str]], example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(typed(f"--config {example.relative_to(ROOT)} --check"))
    said = capsys.readouterr()
    if example.stem in NEEDS_MORE:
        assert code == 2 and re.search(NEEDS_MORE[example.stem], said.err)
    else:
        assert code == 0, said.err
