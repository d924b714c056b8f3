"""What the core wants sent."""

from __future__ import annotations

from typing import NamedTuple

from buffer.tokens import Array
from protocol.messages import Message, Role


class Outgoing(NamedTuple):
    """A message to send: to whom, what, and its frames."""

    role: Role
    name: str
    message: Message
    arrays: tuple[Array, ...] = ()


class Outbox:
    """Collects what one event wants sent."""

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []
        self.learner: str | None = None
        """Name of the learner that is connected."""

    def send(self, role: Role, name: str, message: Message, arrays: tuple[Array, ...] = ()) -> None:
        self._messages.append(Outgoing(role, name, message, arrays))

    def send_learner(self, message: Message, arrays: tuple[Array, ...] = ()) -> None:
        """To the learner if one is connected: it is told again, or asks again, when it comes back."""
        if self.learner is not None:
            self.send("learner", self.learner, message, arrays)

    def take(self) -> list[Outgoing]:
        """Empty it."""
        messages, self._messages = self._messages, []
        return messages
