"""An actor on another host, on a real SGLang server there: each version goes to it encrypted, by the learner's port."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from stillhouse.sglang_server.servers import DEFAULT_PYTHON
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.run_at_home import RunAtHome

pytestmark = [pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu")]
STEPS: Final = 6
CUT_S: Final = 8.0
SETTINGS: Final = (
    *("--actor.engine=sglang", "--teacher.engine=torch", "--device=cpu", "--actors=0", "--teachers=1"),
    *(f"--steps={STEPS}", "--learner.eval_every=0", "--max-staleness=1", "--weights.dtype=bfloat16"),
)


def test_a_server_on_another_host_is_sent_adapters_alone(tmp_path: Path) -> None:
    """By wire, because that host sees no folder of the run's."""
    with ExitStack() as stack:
        network = stack.enter_context(hosts_or_skip("home", "guest", delay_ms=5.0, loss=0.0))
        ours = RunAtHome(network, tmp_path, stack, *SETTINGS[:-1], "--learner.lora.rank=8", "--weights.adapters=on")
        run = ours.run
        guest = ours.join("guest", "--actors=1", to=ours.export())
        ours.expect_good_end(guest)
        summary = run.summary()
        assert summary["steps"] == STEPS and summary["staleness"]["max"] <= 1
        assert summary["workers"]["actor-guest-0"]["tokens"] > 0
        assert "each version is its adapters, which servers load" in run.text()
        assert guest.summary()["workers"]["actor-guest-0"]["restarts"] == 0, guest.text()
        copies = list((guest.folder / "adapters" / "actor-guest-0").iterdir())
        assert copies and all((copy / "adapter_config.json").is_file() for copy in copies)
        assert not list((run.run_dir / "weights").glob("**/*.safetensors")), "no version was written at home"
        run.expect_clean_audit()


def test_a_server_on_another_host_samples_under_each_version_that_it_was_sent(tmp_path: Path) -> None:
    """50 ms and 1 % loss; in the middle its host is cut off for a while."""
    with ExitStack() as stack:
        network = stack.enter_context(hosts_or_skip("home", "guest", delay_ms=50.0, loss=0.01))
        ours = RunAtHome(network, tmp_path, stack, *SETTINGS)
        run = ours.run
        guest = ours.join("guest", "--actors=1", to=ours.export())
        run.until(lambda: len(run.steps()) >= 2, "the first steps")
        network.cut_off("guest")
        time.sleep(CUT_S)
        network.connect("guest")
        ours.expect_good_end(guest)
        summary = run.summary()
        assert summary["steps"] == STEPS and summary["staleness"]["max"] <= 1
        assert summary["workers"]["actor-guest-0"]["tokens"] > 0
        assert "weights.transport wire" in run.text(), "what the launcher said of the way of the weights"
        assert guest.summary()["workers"]["actor-guest-0"]["restarts"] == 0, guest.text()
        run.expect_clean_audit()
