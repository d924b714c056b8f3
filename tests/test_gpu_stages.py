"""The stages of scripts/gpu, which a GPU sees for minutes only, run here as they stand: gloo in place of NCCL, and
SGLang servers on the CPU, of the version that travels to the GPU."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stillhouse.protocol.addresses import free_port
from stillhouse.sglang_server.servers import DEFAULT_PYTHON, SERVER_ARGS, VERSION_VARIABLE, server_environment
from tests.patience import RUN_PATIENCE_S

ROOT = Path(__file__).parent.parent
TRAVELS = "0.5.17"


@pytest.fixture
def stage_environment(tmp_path: Path) -> dict[str, str]:
    """Where the GPU machine has what unpack.sh unpacks, this one has its own virtual environments."""
    try:
        servers = server_environment({VERSION_VARIABLE: TRAVELS})
    except FileNotFoundError as error:
        pytest.skip(str(error))
    python = tmp_path / "sglang-python"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in servers.items())
    script = f'#!/bin/sh\nunset SGLANG_USE_CPU_ENGINE\n{exports}exec {DEFAULT_PYTHON} "$@"\n'
    python.write_text(script, encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / ".complete").touch()
    own = {VERSION_VARIABLE: TRAVELS, "DEVICE": "cpu", "BACKEND": "gloo", "RECIPES": "bare", "MIB": "4"}
    own |= {"PROBE_ARGS": "--requests 4", "SERVING_ARGS": "--prompt 32 --answer 32"}
    own["RACE_ARGS"] = "--save-every 2 --only Stillhouse"
    own["PROFILE_ARGS"] = "--square 64 --steps 1 --rows as-it-is attention"
    places = {"GPU_SITE": "site", "STAGE_TMP": "", "OUT": "out", "SGLANG_PYTHON": python.name}
    limits = {name: str(int(RUN_PATIENCE_S)) for name in ("AWAIT_S", "STAGE_S", "KILL_LIMIT_S")}
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "GLOO_"))},
        **own,
        **{name: str(tmp_path / place) for name, place in places.items()},
        **limits,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SERVE_ARGS": shlex.join(SERVER_ARGS),
        "STAGE_PORT": str(free_port("127.0.0.1")),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (("a",), ["bare", "True", "stage a: rc 0"]),
        (("b", "tiny", "gloo"), ["weights by gloo, turn 1", "weights from a folder", "stage b: rc 0"]),
        (("c", "gloo", "3"), ["finished", "ledger balanced", "| server-actor-0 | -", "stage c: rc 0"]),
        (("d", "gloo", "2", "tiny", "0"), ["finished", "ledger balanced", "| learner-0 | ", "stage d: rc 0"]),
        (("e", "8", "2"), ["| ipc | ", "| gloo | ", "gloo / ipc: ", "finished", "clean", "stage e: rc 0"]),
        (("f", "16"), [", in a version | ", "ledger balanced", "everything held", "| server-actor-0 | -", "rc 0"]),
        (("g", "tiny", "4,8"), ["| 4 | 8 | 256 | 256 | ", "| 8 | 16 | 512 | 512 | ", "stage g: rc 0"]),
        (("h", "tiny", "2"), ["finished", "ledger balanced", "| server-teacher-0 | -", "stage h: rc 0"]),
        (
            ("i", "tiny", "256"),
            ["| step, as-it-is | ", "| attention, as-it-is | ", "| matrix products |", "stage i: rc 0"],
        ),
        (
            ("j", "2"),
            [
                "| settings, seed | seconds to 0.75, Stillhouse | TRL | ratio |",
                "| best, 0 | Stillhouse | 0.",
                "stage j: rc 0",
            ],
        ),
        (("k", "hybrid-tiny", "2"), ["ok       weights taken", "0 failed", "in order", "clean", "stage k: rc 0"]),
    ],
    ids=lambda value: str(value[0]),
)
def test_a_stage_runs_as_it_stands(stage: tuple[str, ...], says: list[str], stage_environment: dict[str, str]) -> None:
    ran = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu" / f"stage_{stage[0]}.sh"), *stage[1:]],
        cwd=ROOT,
        env=stage_environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=3 * RUN_PATIENCE_S,
        check=False,
    )
    missing = [words for words in says if words not in ran.stdout]
    assert not missing and "FAILED " not in ran.stdout, f"{missing}\n{ran.stdout[-6000:]}\n{ran.stderr[-3000:]}"
