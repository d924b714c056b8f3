"""Running servers: what is made of their answers. (Real ones are asked in tests/integration/test_sglang_run.py.)"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stillhouse.engines.provider import record_server
from stillhouse.engines.sglang import attached
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.features import Features
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.servers.attached import Attached, ask_servers, features_of_run, grouped

A = msgspec.convert(
    {
        "version": "0.5.23",
        "weights_label": "default",
        "max_context": 1024,
        "max_prompt": 1017,
        "max_running": 128,
        "device": "cuda",
        "tp_size": 2,
        "update_sessions": True,
        "pausing": True,
        "labels_settable": True,
        "checksums": True,
        "version_spans": True,
        "incremental_stream": True,
        "stream_interval": True,
        "logprob_temperature": "as_sampled",
        "greedy_logprobs_at_one": True,
    },
    Features,
)
replace = msgspec.structs.replace


def run_on(monkeypatch: pytest.MonkeyPatch, *servers: Features, update_mode: str = "abort") -> Attached:
    """Actors on servers that answer so."""
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 1 + len(servers))]
    by_url = dict(zip(urls, servers, strict=True))

    def probe(url: str, settings: SGLangConfig, *, api_key: str) -> Features:
        return by_url[url]

    monkeypatch.setattr(attached, "probe_server", probe)
    actor = {"engine": "sglang", "urls": urls, "sglang": {"update_mode": update_mode}}
    return ask_servers(build(RunConfig, {"actor": actor, "actors": len(urls)}))


def test_device_and_tp_are_what_the_servers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_on(monkeypatch, A, A)
    assert found.mistakes == []
    assert (found.config.actor.server.device, found.config.actor.server.tp) == ("cuda", 2)
    assert found.servers == [("actor-0", A.facts), ("actor-1", A.facts)]


def test_actors_servers_that_cannot_do_what_is_configured_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = replace(A, version="0.5.17", version_spans=False)
    assert run_on(monkeypatch, A, old).mistakes == []
    (mistake,) = run_on(monkeypatch, A, old, update_mode="retract").mistakes
    assert mistake.startswith("actor.urls: http://127.0.0.1:2: SGLang 0.5.17 ") and "use abort" in mistake


@pytest.mark.parametrize("other", [replace(A, tp_size=1), replace(A, device="cpu")])
def test_actors_servers_that_differ_in_tp_or_device_are_refused(
    monkeypatch: pytest.MonkeyPatch, other: Features
) -> None:
    (mistake,) = run_on(monkeypatch, A, other).mistakes
    assert mistake.startswith("actor.urls: http://127.0.0.1:1 is on cuda with tp 2, http://127.0.0.1:2 is on")


def test_servers_that_can_do_the_same_are_told_once(tmp_path: Path) -> None:
    text = grouped(
        [
            ("actor-0", A.facts),
            ("actor-1", replace(A, weights_label="run/0.1").facts),
            ("teacher-0", replace(A, tp_size=1).facts),
        ]
    )
    assert text.count("SGLang") == 2
    assert "server of actor-0, actor-1 (weights default, run/0.1):" in text
    assert grouped((f"actor-{i}", A.facts) for i in range(20)).startswith("server of actor-0, actor-1, actor-2")
    assert "and 12 more" in grouped((f"actor-{i}", A.facts) for i in range(20))


def test_what_workers_wrote_down_is_read_and_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    assert features_of_run(tmp_path) == ""
    record_server(tmp_path, "actor-0", "http://x", A.facts)
    (tmp_path / "servers" / "actor-1.json").write_text("{")
    assert features_of_run(tmp_path).startswith("server of actor-0 (weights default):")
