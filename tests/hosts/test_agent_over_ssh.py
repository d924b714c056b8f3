"""An agent on another host than its actor: by the tunnel of examples/agents/over_ssh.sh, and in no other way."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.builtin import STUDENT_DIR
from stillhouse.models.tokenizer import load_tokenizer
from tests.actors.endpoint.served import actor
from tests.actors.in_hand import STOP, ticket
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.network import ROOT, Network
from tests.patience import PATIENCE_S, eventually

SSHD: Final = "/usr/sbin/sshd"
SCRIPT: Final = ROOT / "examples" / "agents" / "over_ssh.sh"
ROW: Final = json.dumps({"prompt": "1+2=", "ground_truth": "3"}).encode()
AGENT: Final = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = urllib.request.urlopen(urllib.request.Request(url, body, headers))
text = json.load(reply)["choices"][0]["message"]["content"]
open(sys.argv[1], "w").write(open("/proc/net/fib_trie").read())
print(json.dumps({"reward": float(text == "#" + row["ground_truth"])}))
"""


def make_key(file: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True, timeout=PATIENCE_S)
    return file


@contextmanager
def ssh_server(network: Network, host: str, folder: Path) -> Generator[Path]:
    """A folder with an `ssh` that knows the server's key and has one for it."""
    server, client = make_key(folder / "server"), make_key(folder / "client")
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"HostKey {server}\nAuthorizedKeysFile {client}.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PermitRootLogin prohibit-password\n"
    )
    kind, key, _ = Path(f"{server}.pub").read_text(encoding="utf-8").split(" ", 2)
    (folder / "known_hosts").write_text(f"{network.address(host)} {kind} {key}\n")
    (folder / "ssh_config").write_text(f"IdentityFile {client}\nUserKnownHostsFile {folder / 'known_hosts'}\n")
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"\n')
    program.chmod(0o755)
    with (folder / "sshd.log").open("wb") as log:
        command = network.command(host, [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")])
        process = subprocess.Popen(command, stderr=log)
    try:
        yield program.parent
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.fixture
def tokenizer() -> TextTokenizer:
    return TextTokenizer(load_tokenizer(STUDENT_DIR))


@pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd: apt-get install openssh-server")
def test_an_agent_on_another_host_reaches_its_episode_by_ssh_only(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    ids = [*tokenizer.encode("#3").tolist(), STOP]
    with hosts_or_skip("actor", "agents", delay_ms=2.0) as network, ssh_server(network, "agents", tmp_path) as ssh:
        monkeypatch.setenv("PATH", f"{ssh}:/usr/bin:/bin")
        where, seen = network.address("agents"), tmp_path / "seen"
        agent = f"{sys.executable} {tmp_path / 'agent.py'} {seen}"
        far = EnvConfig(name="command", options={"argv": [str(SCRIPT), where, agent]}, step_timeout_s=PATIENCE_S)
        with network.entered("actor"):
            eventually(lambda: reached(where, 22), lambda: (tmp_path / "sshd.log").read_text())
            with actor(tokenizer, lambda _: ids, far=far) as one:
                episode = one.begin(0)
                port = urlsplit(episode.endpoint.base_url).port or 0
                assert reached("127.0.0.1", port)
                one.add(ticket(1, env="far", row=ROW, ground_truth="3"))
                eventually(seen.exists, "the agent's own word")
                with network.entered("agents"):
                    assert not reached(network.address("actor"), port), "the endpoint is on loopback only"
                episode.end()
                one.until_gone()
                assert one.hand.whole("train-1-0-0")[0][-1].reward == 1.0, one.hand.failures
        assert f"{where}\n" in seen.read_text() and network.address("actor") not in seen.read_text(), "it was there"


def reached(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(PATIENCE_S)
        return probe.connect_ex((host, port)) == 0
