"""Settings of a learned value function, for advantages of single tokens (learner.advantage = gae). No torch here."""

from __future__ import annotations

import math

import msgspec


class ValueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One linear layer on the student's last hidden state, trained beside it. Used by advantage = gae (and by further
    advantages of single tokens), by no other."""

    coef: float = 0.5
    """Of the value loss. The head has an optimizer of its own, so this matters where through_backbone lets the loss
    into the student's gradient too."""
    lr: float = 1e-4
    """Highest learning rate of the head; warm-up and schedule are the student's. One update moves a value by up to
    about lr * hidden size."""
    clip: float = 0.0
    """A value that has moved by more than this since the batch came is trained no further towards the return (Schulman
    et al. 2017). Acts from the second of several updates_per_batch on. 0 = off."""
    discount: float = 1.0
    """Of what is paid one token later (gamma)."""
    decay: float = 0.95
    """Of GAE (lambda): 1: reward minus value, without bias; 0: the next token's value in place of all that follows."""
    through_backbone: bool = False
    """Let the value loss train the student's other layers as well. Without it only the head learns from it."""

    def __post_init__(self) -> None:
        for name in ("coef", "lr"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"value.{name} must be positive and finite, got {getattr(self, name)}")
        if not 0.0 <= self.clip < math.inf:
            raise ValueError(f"value.clip must be at least 0 (off), got {self.clip}")
        for name in ("discount", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"value.{name} must be in [0, 1], got {getattr(self, name)}")
