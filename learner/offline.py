"""Mixes rollouts that a teacher wrote into the student's batches, so that over the run a share lambda of the trained
tokens are the student's own.

    after a batch with n tokens of the student:   owed += n * (1 - lambda) / lambda
    next rollout of the file, of m tokens:        taken while owed >= m / 2, owed -= m

So the tokens taken differ from those owed by at most half a rollout, at every step. Tokens are counted instead of
rollouts, because the buffer may deliver a rollout in pieces. Staleness does not apply: the policy that wrote these
rollouts never changes. The buffer's ledger does not count them.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from stillhouse.learner.batch import TrainItem, train_items
from stillhouse.learner.objectives.config import OfflineConfig, check_given
from stillhouse.recording.format import RecordedRollout, RecordError
from stillhouse.recording.reader import Recording

STATE_FORMAT: Final = 1
log = logging.getLogger(__name__)


class OfflineMixer:
    """Endless rollouts of one file, in a new order on every pass. Owned by one thread; owns the recording."""

    def __init__(self, recording: Recording, config: OfflineConfig, *, seed: int) -> None:
        """Raises RecordError for a file that no teacher wrote, or that lacks the top-k sets which the divergence
        needs."""
        header = recording.header
        if header.writer == "student":
            raise RecordError(
                f"{recording.path} was written by the student of the run {header.run!r}; expected one that the teacher "
                "wrote (stillhouse write) for learner.offline.file"
            )
        try:
            check_given(header.writer, str(recording.path), config.objective)
        except ValueError as error:
            raise RecordError(f"learner.offline: {error}") from error
        recording.expect_top_k(config.objective.needs_top_k_for)
        self._recording = recording
        self._owed_per_token = (1.0 - config.student_fraction) / config.student_fraction
        self._seed = seed
        self._places = [(b, i) for b, batch in enumerate(recording.batches) for i in range(len(batch.record.items))]
        self._position = 0
        """Items read so far, including earlier passes."""
        self._order: tuple[int, np.ndarray[Any, Any]] | None = None
        self._next: tuple[RecordedRollout, TrainItem] | None = None
        self._student_tokens = 0
        self._taken_tokens = 0
        self._taken = 0
        self._skipped: Counter[str] = Counter()

    @property
    def figures(self) -> dict[str, float]:
        """Running totals for the metrics."""
        skipped = {f"offline/skipped_{reason}_total": float(n) for reason, n in self._skipped.items()}
        return {
            "offline/rollouts_total": float(self._taken),
            "offline/tokens_total": float(self._taken_tokens),
            "offline/passes": self._position / len(self._places),
            **skipped,
        }

    @property
    def tokens_total(self) -> int:
        """Tokens taken from the file so far."""
        return self._taken_tokens

    def take(self, student_tokens: int) -> list[tuple[RecordedRollout, TrainItem]]:
        """Rollouts to add to a batch with `student_tokens` trained tokens. Raises RecordError if nothing in the file
        can be trained, or a rollout cannot be read."""
        self._student_tokens += student_tokens
        taken: list[tuple[RecordedRollout, TrainItem]] = []
        while True:
            following = self._next = self._next or self._read()
            n = following[1].n_trained
            if self._student_tokens * self._owed_per_token - self._taken_tokens < n / 2:
                return taken
            taken.append(following)
            self._next = None
            self._position += 1
            self._taken += 1
            self._taken_tokens += n

    def close(self) -> None:
        self._recording.close()

    def state(self) -> dict[str, Any]:
        """State for `load_state`, as JSON types."""
        return {
            "format": STATE_FORMAT,
            "identity": self._identity,
            "position": self._position,
            "student_tokens": self._student_tokens,
            "taken_tokens": self._taken_tokens,
            "taken": self._taken,
            "skipped": dict(self._skipped),
        }

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Resume from `state`; None, from a checkpoint without it, starts at the beginning of the file. A different
        file is read from its beginning, and the counts continue."""
        if state is None:
            return
        if state["format"] != STATE_FORMAT:
            raise RecordError(f"offline state has format {state['format']!r}, expected {STATE_FORMAT}")
        self._student_tokens, self._taken_tokens = state["student_tokens"], state["taken_tokens"]
        self._taken, self._skipped = state["taken"], Counter(state["skipped"])
        if state["identity"] == self._identity:
            self._position = state["position"]
        else:
            log.warning("%s is not the file of the checkpoint; it is read from its beginning", self._recording.path)

    @property
    def _identity(self) -> list[Any]:
        return [self._recording.header.run, self._recording.header.config_digest, len(self._places), self._seed]

    def _read(self) -> tuple[RecordedRollout, TrainItem]:
        """The next rollout with tokens to train. Advances `_position` to it."""
        for _ in range(2 * len(self._places)):  # the only good one may come first in a pass and last in the next
            rollout = self._at(self._position)
            if rollout.offline:
                reason = "not_its_own"
            elif not rollout.item.teachers:
                reason = "unscored"
            else:
                train_item = offline_item(rollout)
                if train_item.n_trained:
                    return rollout._replace(offline=True), train_item
                reason = "nothing_to_train"
            self._skipped[reason] += 1
            self._position += 1
        raise RecordError(
            f"{self._recording.path}: none of its {len(self._places)} rollouts can be trained ({dict(self._skipped)})"
        )

    def _at(self, position: int) -> RecordedRollout:
        passes, within = divmod(position, len(self._places))
        if self._order is None or self._order[0] != passes:
            self._order = passes, np.random.default_rng([self._seed, passes]).permutation(len(self._places))
        batch, index = self._places[int(self._order[1][within])]
        return self._recording.rollout(self._recording.batches[batch], index)


def offline_item(rollout: RecordedRollout) -> TrainItem:
    """Checked like an item from the buffer. Its id gets a prefix, because both runs may have used the same ids."""
    named = msgspec.structs.replace(rollout.item, rollout_id=f"offline:{rollout.item.rollout_id}")
    return train_items([named], rollout.arrays)[0]


def open_mixer(config: OfflineConfig, fingerprint: str, *, seed: int) -> OfflineMixer | None:
    """None without a file. Raises RecordError for an unusable file or one of another vocabulary."""
    if not config.file:
        return None
    recording = Recording(Path(config.file).expanduser())
    try:
        recording.expect_vocabulary(fingerprint)
        return OfflineMixer(recording, config, seed=seed)
    except BaseException:
        recording.close()
        raise
