"""`stillhouse invite RUN FOLDER`: writes what another machine needs to join the run without seeing its folder.

FOLDER/ (0700)   join.json      the run's name and address
                 config.yaml    its resolved configuration
                 keys/          server.key, learner.key, joiner.key_secret, and a .key_secret for each role
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.launch.config.command_line import split_words
from stillhouse.launch.config.files import read_config
from stillhouse.launch.errors import WRONG_CONFIG_EXIT_CODE, ConfigError, LaunchError, refuse
from stillhouse.launch.join.target import (
    JOIN_FILE,
    TRY_AGAIN_EXIT_CODE,
    JoinCard,
    RunIsFinished,
    TryAgain,
    find_folder,
    listening_address,
    reachable,
    running_record,
)
from stillhouse.launch.runfolder import read_record
from stillhouse.protocol.keys import KEYS

ROLES: Final = ("actor", "teacher")
USAGE: Final = """\
usage: stillhouse invite RUN FOLDER [--roles actor,teacher]

Writes FOLDER with what another machine needs to join the run: its address, its configuration and keys. Copy it there
(scp -rp) and run `stillhouse join FOLDER`. FOLDER holds secrets and only you can read it: anyone who has it can take
part in the run.

  RUN              folder of a running run, or its name in runs/
  FOLDER           folder to create
  --roles ROLES    include the keys of these roles: actor, teacher or both [actor,teacher]

Exit code: 0 when the folder is written, 75 when the run is not running (try again later), 2 when it cannot be joined.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        words = split_words(arguments, own=("roles",), switches=("help",), positional=2)
        if "help" in words.switches:
            print(USAGE, end="")
            return 0
        if words.overrides:
            raise ConfigError(
                *(f"--{key.name}: belongs to the run; invite takes --roles" for key, _ in words.overrides)
            )
        if len(words.positional) != 2:
            raise ConfigError(f"expected RUN and FOLDER, got {len(words.positional)} words; --help shows how")
        roles = tuple(words.own.get("roles", ",".join(ROLES)).split(","))
        if not set(roles) <= set(ROLES):
            raise ConfigError(f"--roles: got {','.join(roles)}, expected actor, teacher or actor,teacher")
        run, folder = words.positional
        card = invite(find_folder(run), Path(folder).expanduser(), roles)
        print(
            f"wrote {folder} for joining {card.name} at {card.address}; copy it there (scp -rp) and run "
            f"`stillhouse join {Path(folder).name}`"
        )
        return 0
    except LaunchError as error:
        refuse(error)
        later = isinstance(error, TryAgain | RunIsFinished)  # a resumed run is over until its launcher is ready
        return TRY_AGAIN_EXIT_CODE if later else WRONG_CONFIG_EXIT_CODE


def files_to_join(run: Path, name: str, address: str, roles: Sequence[str]) -> dict[str, bytes]:
    """Name -> content of all files of such a folder. Some are secret."""
    card = JoinCard(name=name, address=address)
    files = {
        JOIN_FILE: msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n",
        "config.yaml": (run / "config.yaml").read_bytes(),
    }
    if (run / KEYS).is_dir():
        for key in ("server.key", "learner.key", "joiner.key_secret", *(f"{role}.key_secret" for role in roles)):
            files[f"{KEYS}/{key}"] = (run / KEYS / key).read_bytes()
    return files


def invite(run: Path, folder: Path, roles: Sequence[str]) -> JoinCard:
    """Write the folder, all of it or nothing. Raises LaunchError."""
    if read_record(run) is None:
        raise LaunchError(f"{run} is not a run folder; copy an exported folder as it is")
    if folder.exists():
        raise LaunchError(f"{folder} exists already; name a new folder")
    record, config = running_record(run), read_config(run / "config.yaml")
    address = reachable(listening_address(run, record), record.name, record.host, config)
    card = JoinCard(name=record.name, address=address)
    files = files_to_join(run, card.name, card.address, roles)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True, mode=0o700)
        for name, content in files.items():
            (draft / name).parent.mkdir(mode=0o700, exist_ok=True)
            (draft / name).touch(mode=0o600)
            (draft / name).write_bytes(content)
        draft.rename(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise LaunchError(f"{folder} cannot be written: {error}") from error
    return card
