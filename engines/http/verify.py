"""Verifies over HTTP that a server has the weights that were sent, before any request continues.

    checksums    of all its tensors must stay the same when it loads the version from the snapshot file
    canary       log-probs of a short prompt must match the learner's: only this shows what the server computes

No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from stillhouse.engines.base import Int32s
from stillhouse.engines.http.engine import StudentOnServer
from stillhouse.engines.http.link import RequestRefused
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.checks import Canary, CanaryWatch, Checksums, differences
from stillhouse.weights.control_messages import WeightCheck
from stillhouse.weights.errors import SnapshotRefused, WeightsDiffer, WeightsRefused

log = logging.getLogger(__name__)


Ask: TypeAlias = Callable[[str, dict[str, Any]], bytes]
"""(path, body) -> the server's reply; raises RequestRefused."""


class NotComparedError(Exception):
    """Checksums cannot be compared."""


class ServerVerifier:
    """Checks of one server. They also raise what `ask` and `reload` raise, and ValueError for unusable answers."""

    def __init__(self, engine: StudentOnServer[Any, Any]) -> None:
        self._engine = engine
        self._canaries = CanaryWatch()
        self.stats = {
            "weight_checks_total": 0.0,
            "weight_canaries_total": 0.0,
            "weight_checks_skipped_total": 0.0,
        }
        """For the heartbeat: versions with compared checksums, with a compared canary, and with a skipped
        comparison."""

    def check(self, check: WeightCheck, version: WeightVersion, ask: Ask, reload: Callable[[WeightsRef], None]) -> None:
        """`reload` makes the server load a file; it raises SnapshotRefused or RequestRefused. Raises WeightsDiffer,
        naming the differences, and WeightsRefused where a required comparison is impossible."""
        if check.weights is not None:
            try:
                self._check_checksums(check.weights, version, ask, reload)
            except NotComparedError as error:
                if check.required or check.canary is None:
                    raise WeightsRefused(
                        f"version {version}: checksums cannot be compared: {error}. With weights.verify = auto "
                        "a canary prompt is enough"
                    ) from error
                self.skip(str(error))
        if check.canary is not None:
            self.check_canary(check.canary, version, ask)

    def check_canary(self, canary: Canary, version: WeightVersion, ask: Ask) -> None:
        """Compare the canary, while no request is at the server. Raises WeightsDiffer."""
        found = self._score(np.array(canary.token_ids, np.int32), ask)
        wrong = self._canaries.why_wrong(canary, found, self._engine.features.precision)
        if wrong is not None:
            raise WeightsDiffer(f"version {version}: {wrong}")
        self.stats["weight_canaries_total"] += 1

    def _score(self, ids: Int32s, ask: Ask) -> list[float]:
        """The log-probs of ids[1:], by no cache of other weights."""
        raise NotImplementedError

    def _checksums(self, ask: Ask) -> Checksums:
        """The checksums of all tensors. Raises NotComparedError."""
        raise NotImplementedError

    def skip(self, why: str) -> None:
        """Count a comparison that was impossible; the first one is logged."""
        if not self.stats["weight_checks_skipped_total"]:
            log.warning("%s: its weights are verified by the canary prompt only: %s", self._engine.server.url, why)
        self.stats["weight_checks_skipped_total"] += 1

    def _check_checksums(
        self, file: WeightsRef, version: WeightVersion, ask: Ask, reload: Callable[[WeightsRef], None]
    ) -> None:
        said = self._checksums(ask)
        try:
            reload(file)
        except (SnapshotRefused, RequestRefused) as error:
            raise NotComparedError(str(error)) from error
        wrong = differences(said, self._checksums(ask))
        if wrong:
            raise WeightsDiffer(f"version {version}: {len(wrong)} tensors differ from the learner's: {wrong[:8]}")
        self.stats["weight_checks_total"] += 1
        log.info("version %s: checksums are the learner's", version)
