"""The lists of slow tests name files that there are."""

from __future__ import annotations

from tests.conftest import HERE, QUICK_FILES_OF_THEM, REPRESENTATIVE, SLOW_FILES, SLOW_FOLDERS


def test_every_folder_and_file_that_is_slow_or_not_exists() -> None:
    for path in (*SLOW_FOLDERS, *SLOW_FILES, *QUICK_FILES_OF_THEM, REPRESENTATIVE):
        assert (HERE / path).exists(), f"tests/conftest.py names {path}"
