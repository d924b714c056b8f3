"""What weights are called on a server."""

from __future__ import annotations

import pytest

from stillhouse.engines.http.stream import Labels
from stillhouse.protocol.messages import WeightVersion

LABELS = Labels("run-7")


@pytest.mark.parametrize("version", [WeightVersion(0, 0), WeightVersion(0, 1), WeightVersion(3, 14)])
@pytest.mark.parametrize("labels", [LABELS, Labels("")])
def test_a_label_names_its_version(labels: Labels, version: WeightVersion) -> None:
    assert labels.parse(labels.of(version)) == version


@pytest.mark.parametrize(
    "label", ["", "0.1", "run-8/0.1", "run-70.1", "run-7/", "run-7/7", "run-7/1.2.3", "run-7/v1.2"]
)
def test_a_label_of_somebody_else_is_not_taken_for_a_version(label: str) -> None:
    assert LABELS.parse(label) is None


def test_the_weights_of_an_update_that_was_not_finished_are_unknown() -> None:
    assert LABELS.parse(LABELS.updating(WeightVersion(0, 3))) is None
