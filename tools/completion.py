"""`stillhouse completion SHELL`: prints a script that completes the keys of `stillhouse`, and values that are choices.

    source <(stillhouse completion bash)        in ~/.bashrc; zsh alike
    stillhouse completion fish | source         in ~/.config/fish/config.fish

The script contains the keys, so that completing does not start Python.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from stillhouse.launch.cluster import COMMANDS
from stillhouse.launch.config.command_line import OWN_FLAGS, SWITCHES
from stillhouse.launch.config.keys import keys_of, sections_of
from stillhouse.launch.config.run import SHORT_FLAGS, RunConfig
from stillhouse.launch.errors import WRONG_CONFIG_EXIT_CODE

SHELLS: Final = ("bash", "zsh", "fish")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if list(arguments) in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        got = " ".join(arguments) or "nothing"
        print(f"stillhouse: completion: got {got}, expected one of {', '.join(SHELLS)}", file=sys.stderr)
        return WRONG_CONFIG_EXIT_CODE
    print(script(arguments[0]))
    return 0


def script(shell: str) -> str:
    """The completion script for one of SHELLS."""
    if shell == "fish":
        return "\n".join(_fish())
    header = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return header + "\n".join(_bash())


def _flags() -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """(flag, choices): () when any value may follow, None when the flag takes no value."""
    for name in OWN_FLAGS:
        yield f"--{name.replace('_', '-')}", ()
    for name in SWITCHES:
        yield f"--{name}", None
    for key in keys_of(RunConfig):
        choices = _choices(key.type) or (tuple(key.members.known()) if key.members is not None else ())
        yield f"--{key.name}", choices
        if key.name in SHORT_FLAGS:
            yield f"--{SHORT_FLAGS[key.name]}", choices


def _choices(annotation: object) -> tuple[str, ...]:
    if annotation is bool:
        return ("true", "false")
    if typing.get_origin(annotation) is Literal:
        return tuple(map(str, typing.get_args(annotation)))
    return ()


def _bash() -> Iterator[str]:
    flags = dict(_flags())
    topics = ["all", *(name for name, _ in sections_of(RunConfig))]
    yield "_stillhouse() {"
    yield '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '  if [[ $current == "=" ]]; then current=""; fi  # bash treats `=` as a separate word'
    yield '  if [[ $previous == "=" ]]; then previous="${COMP_WORDS[COMP_CWORD-2]}"; fi'
    yield '  case "$previous" in'
    yield f'    --help) COMPREPLY=($(compgen -W "{" ".join(topics)}" -- "$current")); return;;'
    for flag, choices in flags.items():
        if choices:
            yield f'    {flag}) COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$current")); return;;'
    yield f'    completion) COMPREPLY=($(compgen -W "{" ".join(SHELLS)}" -- "$current")); return;;'
    yield "  esac"
    yield "  if [[ $current == -* ]]; then"
    yield f'    COMPREPLY=($(compgen -W "{" ".join(flags)}" -- "$current"))'
    yield "  elif [[ $COMP_CWORD -eq 1 ]]; then"
    yield f'    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$current"))'
    yield "  fi"
    yield "}"
    yield "complete -o default -F _stillhouse stillhouse"


def _fish() -> Iterator[str]:
    yield f"complete -c stillhouse -n __fish_use_subcommand -fa '{' '.join(COMMANDS)}'"
    for flag, choices in _flags():
        value = "" if choices is None else f" -xa '{' '.join(choices)}'" if choices else " -r"
        yield f"complete -c stillhouse -l '{flag.removeprefix('--')}'{value}"
