"""The rendered script on a real Slurm: a run over several hosts is stopped near the end of its time, queued again, and
goes on from its checkpoint. The record of all batches is audited."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.render.command import main as render_command
from stillhouse.launch.render.slurm import SlurmJob, sbatch_script
from stillhouse.launch.topology import HostGroup
from stillhouse.tools.audit.run import audit
from tests.launch.render.slurm_cluster import CORES, Slurm, missing
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually

ROOT = Path(__file__).parents[3]
STEPS = 80
TOPOLOGY = """\
steps = 80
actors = 3
teachers = 2
learner = { lr = 3e-4, eval_every = 0, checkpoint_every = 5, record = "RECORD" }
weights = { allow_plain_network = true }
buffer = { batch_rollouts = 16 }
cluster = { port = PORT, learner = { cpus = 1, memory_gib = 4 }, actors = { each = 2, cpus = 1, memory_gib = 4 }, \
teachers = { each = 2, cpus = 1, memory_gib = 4 } }
"""


def render(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "cluster.py"), "render", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_reads_the_script_and_each_group_has_its_component(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text(
        TOPOLOGY.replace("RECORD", str(tmp_path / "record")).replace("PORT", "5555")
    )
    run = ("--run-dir", str(tmp_path / "big"), "--config", str(tmp_path / "topology.toml"))
    options = "--cluster.sbatch=--partition=gpu --time=1:00:00"
    script = render("slurm", *run, options, "--cluster.actors.gpus", "2")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    components = script.split("#SBATCH hetjob")
    assert [part.count("--nodes=") - part.count("srun") for part in components] == [1, 1, 1]
    assert [("--gres=gpu:2" in part) for part in components] == [False, False, True]
    assert all("#SBATCH --partition=gpu --time=1:00:00" in part for part in components)
    alone = render("slurm", *run, "--cluster.actors.each", "0", "--cluster.teachers.each", "0")
    subprocess.run(["bash", "-n"], input=alone, text=True, check=True)
    assert "hetjob" not in alone
    assert "srun" not in alone


def test_each_pool_has_a_component_and_joins_as_itself(tmp_path: Path) -> None:
    pools = ("--pools.math.count=3", "--pools.style.count=1", "--learner.tasks.routes={math: [], style: []}")
    hosts = ("--cluster.teachers.each=2", "--actors=1", "--weights.allow_plain_network=true")
    script = render("slurm", "--run-dir", str(tmp_path / "big"), *pools, *hosts)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.count("#SBATCH hetjob") == 2
    assert "shares=(2 1); join_run --pool math --teachers ${shares[SLURM_PROCID]}" in script
    assert "shares=(1); join_run --pool style --teachers ${shares[SLURM_PROCID]}" in script
    assert "--name-prefix teachers-math-$SLURM_PROCID" in script
    assert " --pools.math.count 0 --pools.style.count 0" in script


def test_what_cannot_be_rendered_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("slurm", "--run-dir", str(tmp_path / "big"))
    for words, message in (
        (
            (*run, "--backend", "slurm"),
            "got 'slurm', expected one of local, ray; a job for Slurm or Kubernetes is made by",
        ),
        ((*run, "--cluster.sbatch='"), "which a shell cannot read"),
        ((*run, "--backend", "ray"), "launch.backend: got ray, expected local"),
    ):
        assert render_command(words) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 2, 143])
def test_a_run_that_has_ended_before_the_script_waits_gives_its_exit_code(tmp_path: Path, code: int) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nexit {code}\n")
    python.chmod(0o755)
    job = SlurmJob(
        name="run",
        run_dir=tmp_path / "run",
        python=python,
        where=tmp_path,
        arguments=(),
        groups=(HostGroup("run", (1,), HostConfig()),),
        port=5555,
    )
    script = sbatch_script(job).replace("run=$!", "run=$!; sleep 0.5")
    assert subprocess.run(["bash", "-c", script], timeout=PATIENCE_S).returncode == code


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_run_that_is_submitted_is_requeued_stopped_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the commands of docs/cluster.md."""
    folder = Path(tmp_path_factory.mktemp("slurm"))
    run_dir, file, script = folder / "run", folder / "topology.toml", folder / "job.sbatch"
    with Slurm(folder, hosts=4) as slurm:
        file.write_text(TOPOLOGY.replace("RECORD", str(folder / "record")).replace("PORT", str(_free_port())))
        assert CORES > 1
        script.write_text(render("slurm", "--run-dir", str(run_dir), "--config", str(file)))
        submit = lambda: slurm.run("sbatch", "--parsable", str(script)).strip()  # noqa: E731
        text = lambda: "".join(log.read_text() for log in folder.glob("run.slurm-*.log"))  # noqa: E731
        job = submit()
        eventually(lambda: steps_made(run_dir) >= 8, lambda: f"8 steps; the log:\n{text()}", RUN_PATIENCE_S)
        slurm.run("scancel", "--signal=USR1", "--batch", job)
        eventually(lambda: slurm.states(job) == {"PENDING"}, lambda: f"in the queue again; the log:\n{text()}")
        stopped_at = steps_made(run_dir)
        assert stopped_at < STEPS
        assert "stopped by SIGTERM" in text()
        time.sleep(2.0)  # in the second in which it ended, the hosts would refuse to start it again
        for component in range(3):
            slurm.run("scontrol", "update", f"JobId={job}+{component}", "StartTime=now")
        eventually(lambda: steps_made(run_dir) > stopped_at, lambda: f"more steps; the log:\n{text()}", RUN_PATIENCE_S)
        assert text().count("resuming run") == 1
        slurm.run("scancel", "--signal=TERM", "--batch", job)
        eventually(lambda: not slurm.states(job), lambda: f"the end of the job; the log:\n{text()}", RUN_PATIENCE_S)
        assert steps_made(run_dir) < STEPS, "it was stopped"
        job = submit()
        eventually(lambda: not slurm.states(job), lambda: f"the end of the job; the log:\n{text()}", RUN_PATIENCE_S)
        assert text().count("resuming run") == 2
    assert steps_made(run_dir) == STEPS
    report = audit(run_dir)
    assert report.clean, str(report)
    joined = _json(run_dir / "summary.json")["workers"]
    assert {name.rpartition("-")[0] for name in joined if name.startswith("actor")} == {
        "actor-actors-0",
        "actor-actors-1",
    }
    assert sum(worker["tokens"] > 0 for name, worker in joined.items() if name.startswith("actor")) == 3


def steps_made(run_dir: Path) -> int:
    """Steps made, from the metrics alone."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        return 0
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return max((row["step"] for row in rows if row["kind"] == "step"), default=0)


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]
