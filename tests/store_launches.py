"""Launches that hold a store, and what an independent reader sees there: json, hashlib and boto3 alone."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from stillhouse.learner.checkpoints.stored import OwnedCheckpoints
from stillhouse.protocol.object_store import Store
from stillhouse.protocol.store_owner import Owner, StoreOwner, take
from tests.s3_server import Server, object_named, objects


def claim(token: str) -> Owner:
    return Owner(token=token, run="big", host="here", pid=1, since="2026-11-25T12:00:00+0000")


def take_from_dead(url: str, token: str) -> StoreOwner:
    """As a launch that knows that the one before is dead."""
    return take(Store(url), claim(token), new=False, dead=lambda _: True)


def owned(url: str, token: str = "mine") -> OwnedCheckpoints:
    return OwnedCheckpoints(take_from_dead(url, token))


def owner_in(server: Server, prefix: str) -> dict[str, Any]:
    return json.loads(object_named(server, f"{prefix}/owner.json"))


def whole_folders(server: Server, prefix: str, kind: str) -> dict[str, dict[str, bytes]]:
    """Name -> files of each folder of this kind whose manifest is true."""
    found: dict[str, dict[str, bytes]] = {}
    for key, data in objects(server, f"{prefix}/{kind}/").items():
        name, _, file = key.removeprefix(f"{prefix}/{kind}/").partition("/")
        found.setdefault(name, {})[file] = data
    whole: dict[str, dict[str, bytes]] = {}
    for name, files in found.items():
        try:
            listed = json.loads(files["manifest.json"])["files"]
        except (KeyError, ValueError):  # moto keeps what came of a request that was cut
            continue
        if all(hashlib.sha256(files.get(f, b"")).hexdigest() == entry["sha256"] for f, entry in listed.items()):
            whole[name] = files
    return whole
