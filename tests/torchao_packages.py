"""torchao and bitsandbytes for tests: of this environment, or of the folder into which `make torchao` puts them. They
are in a folder of their own because transformers and peft load them wherever they find them, which takes each process
seconds."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).parents[1] / ".venv-torchao"
THERE: Final = FOLDER.is_dir() or find_spec("torchao") is not None
needs_bitsandbytes = pytest.mark.skipif(
    not (FOLDER / "bitsandbytes").is_dir() and find_spec("bitsandbytes") is None,
    reason="make torchao installs what this needs",
)
needs_torchao = pytest.mark.skipif(not THERE, reason="make torchao installs what this needs")


def add_torchao() -> None:
    """Let this process import them."""
    if find_spec("torchao") is None:
        sys.path.append(str(FOLDER))
