"""The endpoint and the dashboard, read by their users' tools: Prometheus's promtool, which has the parser of its
server, and Grafana's own model of dashboards. Each is skipped where its tool is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch.report.test_prometheus import ROOT, exposition, full
from tests.patience import PATIENCE_S

BOARD = ROOT / "examples" / "grafana" / "stillhouse.json"


def promtool(*arguments: str, stdin: str = "") -> tuple[int, str]:
    """Its exit code and what it said."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on this machine; on Debian: apt-get install prometheus")
    done = subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


def panels(board: Any) -> list[Any]:
    """All panels, those of folded rows too."""
    return [one for panel in board["panels"] for one in (panel, *panel.get("panels", ()))]


def rules(queries: list[str]) -> str:
    """A file of recording rules with these queries; the dashboard's variable is a regular expression in them."""
    lines = [
        f'    - {{record: "q:{i}", expr: {json.dumps(query.replace("$job", ".*"))}}}' for i, query in enumerate(queries)
    ]
    return "\n".join(["groups:", "- name: dashboard", "  rules:", *lines, ""])


def test_promtool_reads_what_the_endpoint_serves_and_finds_nothing_to_say() -> None:
    text = exposition("first", full())
    assert promtool("check", "metrics", stdin=text) == (0, "")
    assert promtool("check", "metrics", stdin=text.replace("# TYPE", "# TIPE", 1) + "broken{")[0] != 0


def test_prometheus_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    board: Any = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in panels(board) for target in panel.get("targets", ())]
    file = tmp_path / "rules.yml"
    file.write_text(rules(queries))
    code, said = promtool("check", "rules", str(file))
    assert code == 0 and f"{len(queries)} rules found" in said, said
    file.write_text(rules([*queries, "rate(stillhouse_steps_total)"]))  # a rate needs a range
    assert promtool("check", "rules", str(file))[0] != 0


def test_grafana_s_model_of_a_dashboard_keeps_everything_that_ours_has() -> None:
    """A key that Grafana does not know is lost in its model."""
    how = "no model of Grafana here: pip install -c constraints.txt -e .[grafana]"
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=how)
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # pyright: ignore
    from grafana_foundation_sdk.cog.plugins import register_default_plugins  # pyright: ignore

    register_default_plugins()
    board: Any = json.loads(BOARD.read_text())

    def through(given: Any) -> Any:
        return json.loads(JSONEncoder(sort_keys=True).encode(dashboard.Dashboard.from_json(given)))

    assert missing(board, through(board)) == []
    board["panels"][0]["gridPosition"] = {"x": 1}
    assert missing(board, through(board)) == [".panels[0].gridPosition is gone"]


def missing(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What is in ours and not in theirs, which may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        gone = [f"{path}.{key} is gone" for key in ours if key not in theirs]
        both = [(ours[key], theirs[key], f"{path}.{key}") for key in ours if key in theirs]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        gone, both = [], [(ours[i], theirs[i], f"{path}[{i}]") for i in range(len(ours))]
    else:
        return [] if ours == theirs else [f"{path} is {theirs!r}"]
    return gone + [line for one in both for line in missing(*one)]
