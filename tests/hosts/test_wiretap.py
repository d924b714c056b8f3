"""Somebody between the hosts reads every frame: he finds the weights of a broadcast, and none of those by wire."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.hosts.conftest import hosts_or_skip
from tests.hosts.network import Network, environment
from tests.hosts.weight_link import MARK, PATTERN
from tests.patience import PATIENCE_S


@pytest.fixture
def network() -> Iterator[Network]:
    with hosts_or_skip("learner", "actor", delay_ms=1.0) as made:
        yield made


def overheard(network: Network, file: Path, settings: dict[str, Any]) -> bytes:
    """All that passes the learner's card while the actor gets PATTERN."""

    def start(stack: ExitStack, host: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.hosts.weight_link", *arguments]
        process = stack.enter_context(
            subprocess.Popen(
                network.command(host, command),
                env=environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        stack.callback(process.kill)
        return process

    with ExitStack() as stack:
        wiretap = start(stack, "learner", "wiretap", str(file))
        assert wiretap.stdout is not None and wiretap.stdout.readline() == "ready\n"
        learner = start(stack, "learner", "learner", msgspec.json.encode(settings).decode())
        actor = start(stack, "actor", "actor")
        assert learner.stdout is not None and actor.stdin is not None and actor.stdout is not None
        plan = learner.stdout.readline()
        actor.stdin.write(plan)
        actor.stdin.flush()
        assert actor.stdout.readline().strip() == hashlib.sha256(PATTERN).hexdigest()
        assert learner.wait(PATIENCE_S) == 0
        wiretap.kill()
        wiretap.wait(PATIENCE_S)
    return file.read_bytes()


@pytest.mark.parametrize("plain", [False, True])
def test_weights_between_hosts_cannot_be_read_unless_that_was_allowed(
    network: Network, tmp_path: Path, plain: bool
) -> None:
    settings = {"host": network.address("learner"), "allow_plain_network": plain, "join_timeout_s": PATIENCE_S}
    heard = overheard(network, tmp_path / "frames", settings)
    assert len(heard) > len(PATTERN)  # they did pass here
    found = heard.count(MARK)
    assert found > len(PATTERN) // len(MARK) // 2 if plain else found == 0, found
