"""Servers of environments and judges are asked before a start; nothing else is."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from stillhouse.launch.checks.environment_servers import check_environment_servers
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.addresses import free_port


def checked(more: dict[str, Any] | None = None, **environments: dict[str, Any]) -> str:
    try:
        check_environment_servers(build(RunConfig, {"actor": {"environments": environments}, **(more or {})}))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def port() -> int:
    """Of nobody."""
    return free_port("127.0.0.1")


def test_each_server_that_does_not_listen_is_named_with_what_starts_it(port: int) -> None:
    judge = {"reward": "judge", "reward_options": {"base_url": f"http://127.0.0.1:{port}/v1", "model": "x"}}
    said = checked(
        game={"name": "openenv", "options": {"url": f"http://user:secret@127.0.0.1:{port}"}},
        tasks={"name": "verifiers", "options": {"server": f"tcp://127.0.0.1:{port}", "tokenizer": "x"}},
        pipe={"name": "verifiers", "options": {"server": "ipc:///no/such/socket", "tokenizer": "x"}},
        single_turn={"options": judge},
    ).splitlines()
    said.sort()
    assert len(said) == 4 and "secret" not in "".join(said)
    for line, key, address, start in (
        (said[0], "game.options.url", f"http://127.0.0.1:{port}", "uvicorn"),
        (said[3], "tasks.options.server", f"tcp://127.0.0.1:{port}", "verifiers_server.py"),
        (said[1], "pipe.options.server", "ipc:///no/such/socket", "verifiers_server.py"),
        (said[2], "single_turn.options.reward_options.base_url", f"http://127.0.0.1:{port}/v1", "judge"),
    ):
        assert line.startswith(f"actor.environments.{key}: nothing answers at {address} (") and start in line


def test_what_listens_or_runs_elsewhere_is_not_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    away = {"name": "openenv", "options": {"url": f"http://127.0.0.1:{port}"}}
    assert checked({"launch": {"backend": "ray"}}, game=away) == checked({"actors": 0}, game=away) == ""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "nothing answers" in checked(game=away)
    monkeypatch.setenv("no_proxy", "")
    assert checked(game=away) == ""  # the proxy knows
    monkeypatch.delenv("http_proxy")
    with socket.create_server(("127.0.0.1", 0)) as there:
        url = f"http://127.0.0.1:{there.getsockname()[1]}"
        assert checked(game={"name": "openenv", "options": {"url": url}}) == checked() == ""


def test_the_mcp_environment_says_where_it_found_nobody(port: int) -> None:
    """The client's own words are "All connection attempts failed"."""
    pytest.importorskip("mcp", reason="make agents installs what this needs")
    import asyncio
    from typing import cast

    from stillhouse.actors.agent import Context
    from stillhouse.actors.envs.adapters.mcp import mcp
    from stillhouse.actors.envs.base import EnvTask, no_tokens

    task = EnvTask(no_tokens(), "7", "", "train-0", 0, {})
    with pytest.raises(ConnectionError, match=rf"the MCP server at \S*127.0.0.1:{port}/mcp cannot be reached: "):
        asyncio.run(mcp(cast(Context, None), task, url=f"http://127.0.0.1:{port}/mcp"))
