"""QLoRA, in a process that finds bitsandbytes when it imports peft and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import RUN_PATIENCE_S
from tests.torchao_packages import FOLDER, needs_bitsandbytes


@pytest.mark.slow
@needs_bitsandbytes
def test_a_student_in_4_bits_with_adapters() -> None:
    own = Path(__file__).with_name("in_4_bits.py")
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""), str(FOLDER)])
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(own)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=RUN_PATIENCE_S
    )
    assert done.returncode == 0 and "....." in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
