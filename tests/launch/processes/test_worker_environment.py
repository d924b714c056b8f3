"""The environment that workers get."""

from __future__ import annotations

import pytest

from stillhouse.launch.processes.local import worker_environment

EXPANDABLE = "expandable_segments:True"


def allocator_settings(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if "ALLOC_CONF" in name}


def test_gpu_memory_is_in_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert allocator_settings(worker_environment(1)) == {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["max_split_size_mb:128", ""])
def test_the_users_own_settings_of_the_allocator_stay(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    assert allocator_settings(worker_environment(1)) == {name: value}
