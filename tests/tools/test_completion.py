"""The shell scripts, run by the shells themselves where they are installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from stillhouse.tools.completion import main, script
from tests.patience import PATIENCE_S

BASH = """{script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_stillhouse; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def bash(*words: str) -> list[str]:
    text = BASH.format(script=script("bash"), words=" ".join(f'"{word}"' for word in ("stillhouse", *words)))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--learner.chec"], ["--learner.checkpoint_every"]),
        (["--max-s"], ["--max-staleness"]),
        (["--device", ""], ["auto", "cpu", "cuda"]),
        (["--device", "=", "cu"], ["cuda"]),
        (["--buffer.mask_truncated", "f"], ["false"]),
        (["--help", "learner.ta"], ["learner.tasks"]),
        (["jo"], ["join"]),
        (["completion", "f"], ["fish"]),
        (["--no-such"], []),
    ],
)
def test_bash_completes_keys_values_sections_and_commands(words: list[str], expected: list[str]) -> None:
    assert bash(*words) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_keys_and_values() -> None:
    def fish(line: str) -> list[str]:
        text = f"{script('fish')}\ncomplete -C '{line}'"
        done = subprocess.run(["fish", "-c", text], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        return done.stdout.split()

    assert fish("stillhouse --learner.chec") == ["--learner.checkpoint_every"]
    assert fish("stillhouse --device cu") == ["cuda"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_takes_the_script_without_complaint() -> None:
    text = f"autoload -U compinit && compinit -u -D\n{script('zsh')}\nprint $_comps[stillhouse]"
    done = subprocess.run(["zsh", "-f", "-c", text], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tcsh"]) == 2
    assert "got tcsh, expected one of bash, zsh, fish" in capsys.readouterr().err
