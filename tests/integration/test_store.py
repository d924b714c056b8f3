"""Whole runs with a store: one goes on in an empty folder, one whose store goes away trains on, and of two launches
only one writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load

from stillhouse.builtin import STUDENT_DIR
from stillhouse.models.loading import load_causal_lm
from tests.faulty_store import Fault, FaultyStore
from tests.integration.conftest import Launched
from tests.patience import PATIENCE_S, eventually
from tests.s3_server import BUCKET, Gate, Server, environment_of, object_named, object_names, s3_server
from tests.store_launches import owner_in, whole_folders

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SETTINGS = ("--learner.eval_every=0", "--learner.checkpoint_every=2", "--actors=1", "--learner.keep_checkpoints=2")
URL = f"s3://{BUCKET}/big"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with s3_server() as made:
        for name, value in environment_of(made.url).items():
            monkeypatch.setenv(name, value)
        yield made


def export(out: Path, *, hidden: Path | None = None) -> str:
    """What a machine that has only the store, and the student's folder, is told. Where `hidden` is, it sees an empty
    disk."""
    alone = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)] if hidden else []
    command = [*alone, sys.executable, "-m", "stillhouse.launch.cluster", "export", URL, "--to", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_in_store(server: Server) -> list[int]:
    """Steps of the checkpoints with a manifest."""
    names = [name.split("/") for name in object_names(server) if name.endswith("/manifest.json")]
    return sorted(int(parts[2].split("_")[1]) for parts in names)


def test_a_run_goes_on_in_an_empty_folder(launch: Callable[..., Launched], server: Server) -> None:
    run = launch("--steps=9", *SETTINGS, f"--store={URL}")
    run.until(lambda: len(run.steps()) >= 4, "four steps")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text()
    stopped_at = len(run.steps())
    assert steps_in_store(server)[-1] == stopped_at, "the last checkpoint is there, too"
    assert len(steps_in_store(server)) <= 2, "older ones are deleted"
    secret = [name for name in object_names(server) if "key" in name or "journal" in name]
    assert owner_in(server, "big")["over"], "the store was given back"
    assert not secret, secret

    again = launch("--steps=9", *SETTINGS, f"--store={URL}", folder="again")
    assert again.process.wait(PATIENCE_S) == 2 and "has checkpoints of a run" in again.text(), again.text()
    shutil.rmtree(again.run_dir, ignore_errors=True)

    elsewhere = run.run_dir.with_name("elsewhere")
    elsewhere.mkdir()
    shutil.move(run.record, elsewhere / "run.record")  # a file of the user's, as the prompts are
    shutil.rmtree(run.run_dir)
    there = launch("--resume", f"--store={URL}", folder="elsewhere/run")
    assert there.wait() == 0, there.text()
    assert "waiting up to" not in there.text(), "the first launch had given the store back"
    assert {"big/launches/2/summary.json", "big/launches/1/metrics.jsonl"} <= set(object_names(server))
    assert f"going on from step {stopped_at}" in there.text()
    assert there.summary()["steps"] == 9 and there.summary()["tokens"]["balanced"]
    assert [row["step"] for row in there.steps()] == list(range(stopped_at + 1, 10))
    assert steps_in_store(server)[-1] == 9
    there.expect_clean_audit()


def test_a_store_that_goes_away_costs_no_step_and_is_counted(
    launch: Callable[..., Launched], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough for the gate to be shut before the last checkpoint."""
    with Gate(server) as gate:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gate.url)
        run = launch("--steps=30", *SETTINGS, f"--store={URL}")
        run.until(lambda: bool(steps_in_store(server)), "a checkpoint in the store")
        gate.shut_after_bytes = 100_000
        run.until(lambda: "could not be written" in (run.run_dir / "logs" / "learner-0.log").read_text(), "the failure")
        left = run.wait()
    assert re.search(
        r"checkpoint (of step \d+ )?could not be written: s3://runs/big: .*no answer from http", run.text()
    )
    assert run.summary()["steps"] == 30 and run.summary()["tokens"]["balanced"], run.text()
    assert left in (0, 1), run.text()
    saved = sorted((run.run_dir / "checkpoints").glob("step_*"))
    assert saved[-1].name == "step_000030", "the run's folder has what the store lacks"
    run.expect_clean_audit()


def test_a_store_out_of_reach_is_refused_before_anything_starts(
    launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("s3fs")
    run = launch("--steps=8", *SETTINGS, f"--store={URL}")
    assert run.process.wait(120) == 2
    assert "store: s3://runs/big" in run.text() and "no answer from http://127.0.0.1:9" in run.text()
    assert not run.run_dir.exists()


def on_host(folder: Path, *arguments: str, hidden: Path | None = None) -> Launched:
    """A launcher whose run is in `folder`; where `hidden` is, it sees an empty disk."""
    folder.mkdir(exist_ok=True)
    alone = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)] if hidden else []
    return Launched(folder / "run", arguments, alone)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_adapters_and_the_average_go_on_on_a_host_with_an_empty_disk(server: Server, tmp_path: Path) -> None:
    """What the run leaves at its end is in the store: the student's checkpoint with the average, the merged student and
    the adapters."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = (
        *(*SETTINGS, "--steps=8", "--max-staleness=1", "--learner.lora.rank=4", f"--models.teacher={STUDENT_DIR}"),
        *("--learner.ema.decay=0.5", "--learner.ema.every=2", f"--store={URL}"),
        *("--learner.tasks.privileged={ground_truth} ", "--learner.tasks.max_teacher_prompt_tokens=64"),
    )
    with ExitStack() as stack:
        first = on_host(one, *settings)
        stack.callback(first.kill)
        first.until(lambda: len(first.steps()) >= 4, "four steps")
        os.kill(first.process.pid, signal.SIGINT)
        assert first.wait() == 130, first.text()
        out = tmp_path / "exported"
        assert export(out, hidden=one) == f"student  {out}\n" and (out / "adapter").is_dir()
        assert load_causal_lm(out, device="cpu", dtype="float32", attention="packed")
        stopped_at = len(first.steps())
        two.mkdir()
        shutil.move(first.record, two / "run.record")
        second = on_host(two, "--resume-or-start", f"--store={URL}", hidden=one)
        stack.callback(second.kill)
        assert second.wait() == 0, second.text()
    assert f"going on from step {stopped_at}" in second.text()
    assert [row["step"] for row in second.steps()] == list(range(stopped_at + 1, 9))
    assert second.steps()[-1]["weights/ema_failures_total"] == 0
    assert f"scoring with the average of version 1.{stopped_at}" in (two / "run/logs/teacher-0.log").read_text()
    second.expect_clean_audit()
    last = whole_folders(server, "big", "checkpoints")["step_000008_epoch_1"]
    average, now = load(last["ema.safetensors"]), load(last["adapter_model.safetensors"])
    assert average and now, "the average of the merged student, and the adapters"
    left = whole_folders(server, "big", "export")
    assert list(left) == ["step_000008_epoch_1"]
    merged = left["step_000008_epoch_1"]
    assert load(merged["adapter/adapter_model.safetensors"]).keys() == now.keys()
    assert all(torch.equal(load(merged["adapter/adapter_model.safetensors"])[name], now[name]) for name in now)
    for name, content in merged.items():
        (tmp_path / "fetched" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fetched" / name).write_bytes(content)
    model = load_causal_lm(tmp_path / "fetched" / "merged", device="cpu", dtype="float32", attention="packed")
    assert sum(p.numel() for p in model.parameters()) > 0


def all_of(run: Launched) -> list[psutil.Process]:
    """The launcher, then its processes."""
    launcher = psutil.Process(run.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def test_two_launches_of_one_store(server: Server, tmp_path: Path) -> None:
    """The second is refused while the first lives; takes over when it stands still; and the first ends when it wakes
    up, without a trace in the store."""
    settings = (*SETTINGS, "--steps=100000", "--learner.record=", f"--store={URL}")
    with ExitStack() as stack:
        first = on_host(tmp_path / "one", *settings)
        stack.callback(first.kill)
        first.until(lambda: bool(steps_in_store(server)), "a checkpoint in the store")

        refused = on_host(tmp_path / "two", *settings, "--resume")
        stack.callback(refused.kill)
        assert refused.process.wait(PATIENCE_S) == 2, refused.text()
        assert "is in use by run on" in refused.text() and f"pid {first.process.pid}" in refused.text()

        frozen = all_of(first)
        for process in frozen:
            process.suspend()
        former = owner_in(server, "big")
        second = on_host(tmp_path / "three", *settings, "--resume")
        stack.callback(second.kill)
        second.until(lambda: any("epoch_1" in name for name in owner_in(server, "big")["checkpoints"]), "a checkpoint")
        assert "which did not end in order; waiting up to 30 s for a sign of life" in second.text()
        for process in reversed(frozen):
            process.resume()
        assert first.process.wait(PATIENCE_S * 3) == 1, first.text()
        assert f"was taken by run on {os.uname().nodename} (pid {second.process.pid}" in first.text(), first.text()
        assert first.summary()["state"] == "failed"

        os.kill(second.process.pid, signal.SIGINT)
        assert second.wait() == 130, second.text()
    found = owner_in(server, "big")
    assert found["token"] != former["token"] and found["over"]
    assert found["epoch"] == former["epoch"] + 1
    assert all("epoch_1" in name for name in found["checkpoints"]), "the two that are kept are the second's"
    whole = whole_folders(server, "big", "checkpoints")
    assert {name.partition("/")[2] for name in found["checkpoints"]} <= set(whole)
    record = json.loads(object_named(server, "big/run.json"))
    assert record["launcher_pid"] == second.process.pid and record["state"] == "stopped"


def test_a_dead_launch_does_not_block_the_next(server: Server, tmp_path: Path) -> None:
    """Killed, all at once: from another folder the next one waits and goes on; from the same one it goes on at once."""
    settings = (*SETTINGS, "--learner.record=", f"--store={URL}")
    with ExitStack() as stack:
        first = on_host(tmp_path / "one", *settings, "--steps=100000")
        stack.callback(first.kill)
        first.until(lambda: bool(steps_in_store(server)), "a checkpoint in the store")
        gone = all_of(first)
        first.kill()
        eventually(lambda: not any(process.is_running() for process in gone[1:]), "the end of its processes")
        kept = [int(one.name.rpartition("_")[2]) for one in (first.run_dir / "checkpoints").glob("step_*")]
        steps = max(*steps_in_store(server), *kept) + 2  # the folder may be ahead of the store
        again = on_host(tmp_path / "one", *settings, "--resume", f"--steps={steps}")
        stack.callback(again.kill)
        assert again.wait() == 0, again.text()
        assert "waiting up to" not in again.text().partition("resuming run")[0].rpartition("checkpoint")[2]
        assert owner_in(server, "big")["over"] and steps_in_store(server)[-1] == steps


def test_a_store_that_refuses_is_seen_on_the_console_and_used_again_when_it_takes_them(
    launch: Callable[..., Launched], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyStore(server) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
        faulty.faults = [Fault("PUT", "/big/checkpoints/", 403)]
        run = launch("--steps=1000", *SETTINGS, f"--store={URL}")
        run.until(
            # of failures that follow one another closely the console has the newest
            lambda: re.search(r"goes on, and the next checkpoint tries again \(\d+ failed\)", run.text()) is not None,
            "the failure",
        )
        assert re.search(
            r"the checkpoint of step \d+ could not be written: s3://runs/big: .*access was refused by http.*; see "
            r"AWS_ACCESS_KEY_ID",
            run.text(),
        )
        assert steps_in_store(server) == []
        run.until(lambda: "CHECKPOINTS NOT WRITTEN" in run.text(), "the count on the status line")
        faulty.faults = []
        run.until(lambda: bool(steps_in_store(server)), "a checkpoint in the store")
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.text()
    assert steps_in_store(server)[-1] == len(run.steps())
    run.expect_clean_audit()


def test_training_goes_on_while_a_store_takes_its_time_and_averages_that_it_refuses_are_seen(
    launch: Callable[..., Launched], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        *(*SETTINGS, "--steps=100000", "--max-staleness=1", f"--models.teacher={STUDENT_DIR}", f"--store={URL}"),
        *("--learner.ema.decay=0.5", "--learner.ema.every=1", "--learner.tasks.privileged={ground_truth} "),
        *("--learner.tasks.max_teacher_prompt_tokens=64", f"--launch.shutdown_grace_s={PATIENCE_S}"),
    )
    with FaultyStore(server) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
        run = launch(*settings)
        run.until(lambda: bool(steps_in_store(server)) and len(run.steps()) >= 3, "a checkpoint in the store")
        faulty.faults = [Fault("PUT", "/big/teacher_weights/", "held"), Fault("PUT", "/big/checkpoints/", "held")]
        run.until(lambda: all(fault.met for fault in faulty.faults), "an average and a checkpoint on their way")
        there, n_steps = steps_in_store(server), len(run.steps())
        run.until(lambda: len(run.steps()) >= n_steps + 5, "steps that wait for neither")
        assert steps_in_store(server) == there, "nothing came there meanwhile"
        assert run.steps()[-1]["weights/ema_put_off_total"] >= 4
        faulty.faults = []
        faulty.release.set()
        run.until(lambda: steps_in_store(server)[-1] > n_steps, "a checkpoint of a later step")
        out = run.run_dir.with_name("exported")
        assert export(out) == f"student  {out}\n" and run.process.poll() is None, "the run goes on"
        assert not (out / "optimizer.safetensors").exists() and (out / "README.md").is_file()
        assert load_causal_lm(out, device="cpu", dtype="float32", attention="packed")
        faulty.faults = [Fault("PUT", "/big/teacher_weights/", 403)]
        run.until(lambda: "training goes on, and the next average tries again" in run.text(), "the failure")
        assert re.search(
            r"no new average of the student for its teachers: s3://runs/big: .*access was refused", run.text()
        )
        run.until(lambda: "AVERAGES NOT SENT" in run.text(), "the count on the status line")
        sent = run.steps()[-1]["weights/ema_snapshots_total"]
        faulty.faults = []
        run.until(lambda: run.steps()[-1]["weights/ema_snapshots_total"] > sent, "averages again")
        faulty.release.clear()
        faulty.faults = [Fault("PUT", "/big/teacher_weights/", "held")]
        run.until(lambda: faulty.faults[0].met > 0, "the last average on its way")
        os.kill(run.process.pid, signal.SIGINT)
        run.until(lambda: steps_in_store(server)[-1] == len(run.steps()), "the last checkpoint")
        names = {name for name in object_names(server) if "/teacher_weights/" in name}
        faulty.release.set()
        assert run.wait() == 130, run.text()
        assert {name for name in object_names(server) if "/teacher_weights/" in name} != names, "the stop waited for it"
    assert steps_in_store(server)[-1] == len(run.steps())
    run.expect_clean_audit()
