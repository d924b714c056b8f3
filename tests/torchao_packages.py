"""torchao for tests: of this environment, or of the folder into which `make torchao` puts it. It is in a folder of its
own because transformers and peft load it wherever they find it, which takes each process seconds."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).parents[1] / ".venv-torchao"
THERE: Final = FOLDER.is_dir() or find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not THERE, reason="make torchao installs what this needs")


def add_torchao() -> None:
    """Let this process import it."""
    if find_spec("torchao") is None:
        sys.path.append(str(FOLDER))
