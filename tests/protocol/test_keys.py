"""The files with a run's keys: who may read them, and what is said about broken ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stillhouse.protocol.errors import KeysUnusable
from stillhouse.protocol.keys import (
    KEYS,
    OWNERS,
    Owner,
    load_client_keys,
    load_server_keys,
    make_keys,
    run_client_keys,
    speaks_for,
)
from stillhouse.protocol.messages import Role


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / KEYS)
    return tmp_path / KEYS


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_may_look_into_the_folder_and_its_files(tmp_path: Path) -> None:
    before = os.umask(0)  # the most careless one
    try:
        make_keys(tmp_path / KEYS)
    finally:
        os.umask(before)
    files = sorted((tmp_path / KEYS).iterdir())
    assert [file.name for file in files] == sorted(
        f"{owner}{end}" for owner in OWNERS for end in (".key", ".key_secret")
    )
    assert mode(tmp_path / KEYS) == 0o700
    assert {mode(file) for file in files} == {0o600}
    assert [entry.name for entry in tmp_path.iterdir()] == [KEYS]


def test_every_role_has_a_pair_of_its_own_and_knows_the_server(folder: Path) -> None:
    server = load_server_keys(folder)
    clients = {owner: load_client_keys(folder, owner) for owner in OWNERS if owner != "server"}
    assert {owner: server.owners[keys.public] for owner, keys in clients.items()} == {owner: owner for owner in clients}
    assert {keys.server for keys in clients.values()} == {server.public}
    assert len({keys.secret for keys in clients.values()} | {server.secret}) == 6


def test_another_listener_has_its_own_pair_and_list(folder: Path) -> None:
    make_keys(folder, ["actor-3", "teacher-0"])
    host = load_server_keys(folder, "learner", ("actor",))
    assert host.public == load_client_keys(folder, "actor", "learner").server
    assert sorted(host.owners.values()) == ["actor", "actor-3"]


def test_a_host_needs_its_own_pair_and_two_public_keys_only(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name not in ("server.key", "learner.key", "actor.key_secret"):
            file.unlink()
    load_client_keys(folder, "actor")
    load_client_keys(folder, "actor", "learner")


def test_keys_are_never_made_over_others_and_those_that_are_missing_are_added(tmp_path: Path, folder: Path) -> None:
    before = {file: file.read_bytes() for file in folder.iterdir()}
    make_keys(folder)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    make_keys(folder, ["actor-0"])
    after = {file: file.read_bytes() for file in folder.iterdir()}
    assert {file.name for file in after.keys() - before.keys()} == {"actor-0.key", "actor-0.key_secret"}
    assert {file: after[file] for file in before} == before and {mode(file) for file in after} == {0o600}
    assert [entry.name for entry in tmp_path.iterdir()] == [KEYS]


def test_a_worker_of_the_runs_own_has_its_own_key_and_one_that_joined_its_roles(tmp_path: Path, folder: Path) -> None:
    make_keys(folder, ["actor-0"])
    assert run_client_keys(tmp_path, "actor", "actor-0") == load_client_keys(folder, "actor-0")
    assert run_client_keys(tmp_path, "actor", "actor-host-0") == load_client_keys(folder, "actor")


def test_who_may_be_whom() -> None:
    yes: list[tuple[Owner, Role, str]] = [
        *[("actor-0", "actor", "actor-0"), ("actor", "actor", "actor-host-0"), ("actor", "actor", "actor-3-0")],
        *[("teacher", "teacher", "teacher-host-0"), ("teacher-12", "teacher", "teacher-12")],
        *[
            ("learner", "learner", "learner-0"),
            ("launcher", "launcher", "launcher"),
            ("joiner", "launcher", "joiner-x"),
        ],
    ]
    no: list[tuple[Owner, Role, str]] = [
        *[("actor", "actor", "actor-0"), ("actor-1", "actor", "actor-0"), ("actor-0", "actor", "actor-host-0")],
        *[("teacher", "actor", "actor-host-0"), ("actor-0", "teacher", "teacher-0"), ("actor-0", "learner", "actor-0")],
        *[
            ("teacher", "teacher", "teacher-0"),
            ("joiner", "launcher", "launcher"),
            ("launcher", "launcher", "joiner-x"),
        ],
        *[("server", "actor", "actor-0"), ("server", "launcher", "launcher"), ("learner", "actor", "learner-0")],
    ]
    assert all(speaks_for(*case) for case in yes)
    assert not any(speaks_for(*case) for case in no)


def test_a_run_without_the_folder_is_not_encrypted(tmp_path: Path, folder: Path) -> None:
    assert run_client_keys(tmp_path / "another", "actor", "actor-0") is None
    assert run_client_keys(tmp_path, "actor", "actor-0") == load_client_keys(folder, "actor")


@pytest.mark.parametrize("owner_mode", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_that_others_may_read_is_refused(folder: Path, owner_mode: int) -> None:
    (folder / "actor.key_secret").chmod(owner_mode)
    with pytest.raises(KeysUnusable, match=f"mode {owner_mode:04o}.*expected 0600"):
        load_client_keys(folder, "actor")


def test_no_error_and_no_repr_shows_a_key(folder: Path) -> None:
    server, client = load_server_keys(folder), load_client_keys(folder, "actor")
    secret = (folder / "actor.key_secret").read_text()
    said = [repr(server), repr(client), str(client)]
    for broken in (secret.replace("public-key", "x"), secret.replace("secret-key", "x"), secret[:-3], secret + "x", ""):
        (folder / "actor.key_secret").write_text(broken.replace(client.secret.decode(), client.secret.decode()[::-1]))
        with pytest.raises(KeysUnusable) as caught:
            load_client_keys(folder, "actor")
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        said.append(str(caught.value))
    (folder / "actor.key_secret").unlink()
    with pytest.raises(KeysUnusable, match=r"actor\.key_secret"):
        load_client_keys(folder, "actor")
    for key in (server.secret, client.secret, client.public, client.secret[::-1]):
        assert not any(key.decode() in text for text in said)


def test_one_key_for_two_roles_is_refused(folder: Path) -> None:
    (folder / "teacher.key").write_bytes((folder / "actor.key").read_bytes())
    with pytest.raises(KeysUnusable, match="same key"):
        load_server_keys(folder)
