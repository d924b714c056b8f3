"""What `python -m launch.write` refuses."""

from __future__ import annotations

import pytest

from launch import write
from launch.errors import WRONG_CONFIG_EXIT_CODE


@pytest.mark.parametrize("key", ["--learner.tasks.privileged=Be brief. ", '--learner.tasks.privileged_tags={"a": "x"}'])
def test_a_text_that_the_writer_would_not_read_is_refused(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(_: object) -> int:
        pytest.fail("a run was started")

    monkeypatch.setattr("launch.run.main", started)
    assert write.main(["out.record", key]) == WRONG_CONFIG_EXIT_CODE
    assert "learner.tasks.privileged: got a text that only teachers read" in capsys.readouterr().err
