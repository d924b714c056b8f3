"""A process that has imported much forks itself for each child: within milliseconds, and all share its memory.

Messages on the control socket are JSON objects, one per line, with their kind as `type`:

    owner -> Signal {pid, signum}, Ping; any other message {name, incarnation, ...} is a child to fork
    here  -> Warm, Forked {name, incarnation, pid}, ForkRefused {name, incarnation, reason}, Exited {pid, code}, Pong

The owner cannot signal a child safely: only the process that reaps it knows whether the pid is still its own. When the
owner closes the socket the children are ended; if this process is killed, the kernel ends them. SIGTERM does not end
it: when a whole process group is terminated, the learner still has a checkpoint to write.

Standard library only: SGLang's interpreter imports it, too (sglang_server.zygote)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from stillhouse.protocol.children import die_with_parent, fork_with_defaults, kill_group, reap

READ_BYTES: Final = 65536
END_POLL_S: Final = 0.025
INHERITED: Final = (signal.SIGCHLD, signal.SIGTERM)
"""Signals that this process handles and a child must not."""


class ForkServer:
    """The loop: requests in, forks and exit codes out. One thread; waits for the socket or for SIGCHLD."""

    def __init__(
        self,
        control: socket.socket,
        become: Callable[[dict[str, Any]], NoReturn],
        refusal: Callable[[], str | None] = lambda: None,
        *,
        grace_s: float = 0.0,
    ) -> None:
        """`become`: called with the message in the child, which leads a session of its own. `refusal`: why forking is
        unsafe now, or None. `grace_s`: between SIGTERM and SIGKILL when everything ends."""
        self._control = control
        self._become, self._refusal, self._grace_s = become, refusal, grace_s
        self._children: set[int] = set()
        self._unread = b""
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)

    def serve(self) -> None:
        """Run until the owner closes the control socket; the children are gone then."""
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)  # a handler must exist for the wake-up fd to fire
        signal.set_wakeup_fd(self._wake.fileno())
        self.send("Warm")
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            open_ = True
            while open_:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(READ_BYTES)
                self._reap()
                if self._control in ready:
                    open_ = self._read()
        self._end_children()

    def send(self, kind: str, **details: Any) -> None:
        self._control.sendall(json.dumps({"type": kind, **details}).encode() + b"\n")

    def _read(self) -> bool:
        received = self._control.recv(READ_BYTES)
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["type"] == "Ping":
                self.send("Pong")
            elif message["type"] == "Signal":
                self._signal(message["pid"], message["signum"])
            else:
                self._fork(message)
        return bool(received)

    def _signal(self, pid: int, signum: int) -> None:
        if pid in self._children:
            if signum == signal.SIGKILL:
                kill_group(pid)
            os.kill(pid, signum)

    def _fork(self, message: dict[str, Any]) -> None:
        who = {"name": message["name"], "incarnation": message["incarnation"]}
        if (reason := self._refusal()) is not None:
            self.send("ForkRefused", **who, reason=reason)
            return
        parent_pid = os.getpid()
        pid = fork_with_defaults(INHERITED)
        if pid == 0:
            self._child(message, parent_pid)
        self._children.add(pid)
        self.send("Forked", **who, pid=pid)

    def _child(self, message: dict[str, Any], parent_pid: int) -> NoReturn:
        try:
            os.setsid()
            die_with_parent(parent_pid)
            signal.set_wakeup_fd(-1)
            for inherited in (self._control, self._woken, self._wake):
                inherited.close()
            self._become(message)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        for pid in tuple(self._children):
            if (code := reap(pid)) is not None:
                self._children.discard(pid)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # end of file follows
                    self.send("Exited", pid=pid, code=code)

    def _end_children(self) -> None:
        for pid in self._children if self._grace_s else ():
            os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + self._grace_s
        while self._children:
            if time.monotonic() >= until_s:
                for pid in self._children:
                    self._signal(pid, signal.SIGKILL)
            self._reap()
            time.sleep(END_POLL_S if self._children else 0.0)
