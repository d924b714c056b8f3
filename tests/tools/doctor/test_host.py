"""Faults of the machine are found: limits, ports, disk, memory, GPUs."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.disk import needed
from stillhouse.launch.checks.host import shared_memory
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.disk_speed import disk_speed
from stillhouse.tools.doctor.gpus import gpus, links
from tests.full_disk import fill, small_disk
from tests.tools.doctor.conftest import Examine, of

Make = Callable[..., ModelCase]
HOST = ("configuration", "open files", "cores", "ports", "disk", "disk speed", "memory", "prompts")


@pytest.mark.parametrize("name", HOST)
def test_a_sound_machine_passes(examine: Examine, name: str) -> None:
    found = examine(name)
    assert found and all(finding.status == "ok" for finding in found), found


@pytest.fixture
def few_files() -> Iterator[int]:
    """A low limit of open files in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    yield 900
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_limit_of_open_files(examine: Examine, few_files: int) -> None:
    """Actors raise their own."""
    few, some, many = (
        examine("open files", f"--actors={n}", "--launch.threads_per_worker=1")[0] for n in (20, 150, 280)
    )
    assert [few.status, some.status, many.status] == ["ok", "warning", "failed"]
    assert many.figures["limit_files"] == few_files and "ulimit -n" in many.advice


def test_more_processes_than_cores(examine: Examine) -> None:
    (found,) = examine("cores", "--actors=3", "--launch.threads_per_worker=1000")
    assert found.status == "warning" and found.figures["threads"] == 5000


def test_too_little_shared_memory(case: Make, tmp_path: Path) -> None:
    """Ranks of the learner use it."""
    several = case("--learner.ranks=2")
    with small_disk(tmp_path / "shm", 64 << 20) as folder:
        (found,) = shared_memory(several, folder)
    assert found.status == "failed" and "ranks of the learner" in found.normal
    (gone,) = shared_memory(several, tmp_path / "nowhere")
    assert gone.status == "failed" and "No such file" in gone.measured


def test_a_port_that_is_taken(examine: Examine) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = examine("ports", f"--buffer.bind=tcp://127.0.0.1:{port}", f"--weights.control_port={port}")
    taken = of(found, "buffer.bind")
    assert taken.status == of(found, "weights.control_port").status == "failed"
    assert "Address already in use" in taken.measured and f"(pid {os.getpid()})" in taken.measured
    assert of(found, "weights.store_port").status == "ok"


def test_an_address_of_another_machine(examine: Examine) -> None:
    found = of(examine("ports", "--buffer.bind=tcp://192.0.2.1:0"), "buffer.bind")
    assert found.status == "failed" and "an address that this machine has" in found.advice


def test_a_full_disk(examine: Examine, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 64 << 20) as folder:
        fill(folder)
        (found,) = examine("disk speed", f"--run-dir={folder / 'run'}")
        assert found.status == "failed" and "No space left" in found.measured
        assert [entry.name for entry in folder.iterdir()] == [".ballast"], "nothing is left there"


def test_a_disk_without_room_for_the_run(examine: Examine, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 64 << 20) as folder:
        (found,) = examine("disk", f"--run-dir={folder / 'run'}")
        assert found.status == "failed" and found.figures["free_bytes"] < found.figures["needed_bytes"]
        small = ("--buffer.journal_log_mb=1", "--buffer.batch_rollouts=1", f"--run-dir={folder / 'run'}")
        assert [one.status for one in examine("disk", *small)] == ["ok"]
        assert [one.status for one in examine("disk", *small, "--learner.keep_checkpoints=100")] == ["warning"]


def test_the_room_for_a_journal_grows_with_what_is_held(case: Make) -> None:
    def journal_mib(*more: str) -> float:
        plain = ("--buffer.journal_log_mb=10", "--buffer.batch_rollouts=64")
        return needed(case(*plain, "--learner.tasks.max_new_tokens=1024", *more).config).journal / (1 << 20)

    held_mib = 2 * 64 * 1024 * 12 / (1 << 20)  # the bound is 1
    assert journal_mib() == 20 + held_mib
    assert journal_mib("--buffer.max_staleness=4") == 20 + held_mib * 5 / 2
    assert journal_mib("--teacher.payload=hidden") == 20 + held_mib * (12 + 1024) / 12


def test_a_slow_disk(case: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which each fsync takes 0.1 s."""
    plain, synced = case(), case("--buffer.journal_sync=disk")
    real = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.1)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    (found,) = disk_speed(synced)
    assert found.status == "warning" and found.figures["fsync_s"] >= 0.1
    assert [one.status for one in disk_speed(plain)] == ["ok"], "the journal does not wait for it"


def test_a_run_that_needs_more_memory_than_the_host_has(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than the margin, beyond which the launcher refuses it."""
    (fine,) = examine("memory")
    needed = float(fine.measured.split()[1])
    monkeypatch.setattr(preflight, "host_gib", lambda: 0.95 * needed)
    (found,) = examine("memory")
    assert found.status == "warning" and "more than it has" in found.measured


SMI = """#!/bin/sh
case "$*" in
-L) echo "GPU 0: NVIDIA H100 (UUID: GPU-a)"; echo "GPU 1: NVIDIA H100 (UUID: GPU-b)";;
*memory.total*index*|*index*) echo "0, GPU-a, NVIDIA H100, 12, 81559"; echo "1, GPU-b, NVIDIA H100, 40000, 81559";;
*memory.total*) echo 81559; echo 81559;;
topo*) cat <<'END'
{topology}
END
;;
esac
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\nGPU1\tNV18\t X \tPHB\tSYS\t0-15\t0\nGPU2\tSYS\tPHB\t X \tSYS\t16-31\t1\n"
    "NIC0\tPIX\tSYS\tSYS\t X \n"
)


def test_the_links_of_gpus() -> None:
    assert links(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}


def test_a_gpu_that_somebody_uses(case: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(SMI.format(topology=TOPOLOGY))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = list(gpus(case()))
    assert of(found, "GPU 0").status == "ok"
    assert of(found, "GPU 1").status == "warning" and "40,000 of 81559 MiB" in of(found, "GPU 1").measured


def test_without_gpus_they_are_skipped(examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = examine("gpus")
    assert found.status == "skipped"


def test_rows_that_cannot_be_used(examine: Examine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1="}\n{"prompt": "' + "1+" * 600 + '="}\n')
    arguments = (f"--prompts={file}", "--learner.eval_every=0")
    found = examine("prompts", *arguments)
    assert any(one.status == "warning" and "prompt_too_long" in one.measured for one in found)
    *_, none = examine("prompts", *arguments, "--learner.tasks.max_prompt_tokens=2")
    assert none.status == "failed" and "none of the 2 rows" in none.measured


def test_a_configuration_that_the_launcher_refuses(examine: Examine) -> None:
    found = examine("configuration", "--teacher=no/such/folder", "--prompts=missing.jsonl")
    assert len(found) >= 2 and all(finding.status == "failed" for finding in found)
    assert any(finding.subject == "models.teacher" and "no/such/folder" in finding.measured for finding in found)


def test_a_configuration_that_the_launcher_warns_of(examine: Examine) -> None:
    found = examine("configuration", "--learner.lr=3e-3", "--max-staleness=8")
    assert "warning" in [finding.status for finding in found], found
