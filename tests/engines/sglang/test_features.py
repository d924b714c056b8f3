"""What a server cannot do is refused by name, before anything is asked of it."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from stillhouse.engines.sglang.config import SGLangConfig, SwapMode
from stillhouse.engines.sglang.features import Features, why_unfit
from tests.server_features import CAPABLE

TRIED: Final = {
    "0.5.17": (False, False),
    "0.5.18": (False, False),
    "0.5.19": (True, False),
    "0.5.20": (True, False),
    "0.5.21": (True, True),
    "0.5.22": (True, True),
    "0.5.23": (True, True),
}
"""SGLang -> whether it says which weights sampled which token, and whether it flushes its cache in a pause: measured on
real servers (tests/sglang)."""


def of_version(version: str) -> Features:
    spans, flushes = TRIED[version]
    return msgspec.structs.replace(CAPABLE, version=version, version_spans=spans, flushes_while_paused=flushes)


@pytest.mark.parametrize("version", TRIED)
def test_requests_stay_at_a_swap_from_0_5_21_on_only(version: str) -> None:
    unfit = why_unfit(of_version(version), SGLangConfig(update_mode="retract"))
    if version in ("0.5.21", "0.5.22", "0.5.23"):
        assert unfit is None
    else:
        assert unfit is not None and unfit.startswith(f"SGLang {version} ") and "use abort" in unfit


@pytest.mark.parametrize("version", TRIED)
@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_requests_are_cut_by_every_version(version: str, mode: SwapMode) -> None:
    assert why_unfit(of_version(version), SGLangConfig(update_mode=mode)) is None


def test_a_server_that_was_not_asked_is_not_trusted() -> None:
    retract = SGLangConfig(update_mode="retract")
    assert why_unfit(msgspec.structs.replace(CAPABLE, flushes_while_paused=None), retract) is not None
    assert "paused" in (why_unfit(msgspec.structs.replace(CAPABLE, pausing=False), retract) or "")
