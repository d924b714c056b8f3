"""The warmed parent: what it shares with its children, and when it refuses to fork."""

from __future__ import annotations

import threading

import pytest
import torch
from launcher_process import StartLauncher

from launch.processes import forkserver


def test_forked_workers_share_the_warmed_parents_memory(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(settings={"actors": 8, "teachers": 2}, preload=("torch", "fake_roles"))
    launcher.until_ready()
    launcher.finish()
    assert launcher.wait() == 0, launcher.said
    assert launcher.summary()["peak_memory_bytes"] < 1 << 30  # 13 processes; torch alone takes some 200 MiB in each


def test_a_process_with_threads_refuses_to_fork() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert "threads, expected 1" in (forkserver.refusal() or "")
    finally:
        done.set()
        thread.join()


def test_a_process_with_a_cuda_context_refuses_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert forkserver.refusal() == "a CUDA context exists in the fork server"
