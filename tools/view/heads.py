"""What a teacher that sent hidden states would have written: its output head turns a recorded state into log-probs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stillhouse import builtin
from stillhouse.launch.config.run import BUILTIN
from stillhouse.launch.config.tree import get
from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.payloads.hidden import decode_hidden, head_of_states

if TYPE_CHECKING:
    from stillhouse.models.logprobs import LmHead

log = logging.getLogger(__name__)


class Heads:
    """Output heads of the teachers of a recorded run, each loaded (with torch) when it is first needed."""

    def __init__(self, config: dict[str, Any]) -> None:
        """`config`: that of the recorded run, as plain values."""
        self._config = config
        self._heads: dict[str, LmHead | None] = {}

    def logprobs(self, teacher: str, payload: bytes, row: int) -> npt.NDArray[np.float32] | None:
        """Log-probs [V] at a row of a payload of hidden states. None where the teacher's model is no longer there, or
        is another one, and for a payload that cannot be read."""
        try:
            state_H, identity = decode_hidden(payload)[row], head_of_states(payload)
        except (MalformedMessage, IndexError):
            return None
        head = self._head_of(teacher)
        if head is None or head.weight_VH.shape[1] != len(state_H) or identity not in (0, head.identity):
            return None
        import torch

        state = torch.from_numpy(state_H.astype(np.int16, copy=True)).view(torch.bfloat16).float()
        return torch.log_softmax(head.logits(state[None]), dim=-1)[0].numpy()

    def _head_of(self, teacher: str) -> LmHead | None:
        if teacher not in self._heads:
            from stillhouse.models.head_file import load_head

            named = str(get(self._config, f"pools.{teacher}.model") or get(self._config, "models.teacher") or BUILTIN)
            path = builtin.TEACHER_DIR if named == BUILTIN else Path(named).expanduser()
            try:
                self._heads[teacher] = load_head(path, device="cpu", dtype="float32")
            except (ValueError, OSError) as error:
                log.warning("no output head of teacher %r: %s", teacher, error)
                self._heads[teacher] = None
        return self._heads[teacher]
