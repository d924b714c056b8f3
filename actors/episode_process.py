"""A process that runs episodes for an actor (`actors.episode_pool`), each on its own thread as in the actor itself.

It says and hears the messages of `actors.episode_wire`, and ends when the other end closes.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final, cast

from stillhouse.actors.env_runner import CLOSE_TIMEOUT_S, TooManyStuck
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.episode_wire import Command, Deliver, Finish, Gauges, GaveUp, Link, Ready, Refuse, Setup, Stop
from stillhouse.actors.episodes import EpisodeStart, EpisodeThreads
from stillhouse.models.files import model_file
from stillhouse.models.tokenizer_file import FileTokenizer

log = logging.getLogger(__name__)
BEAT_S: Final = 1.0
"""Longest time between two reports."""
STOOD_STILL: Final = 1
"""Exit code of a process that ended itself because its main loop stood still."""
FAILED: Final = 2


class EpisodeHost:
    """The main loop."""

    def __init__(self, link: Link, setup: Setup) -> None:
        """Raises whatever an environment raises while it is imported."""
        self._link = link
        self._silence_s = setup.silence_s
        self._woken = threading.Event()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waiting: deque[EpisodeStart] = deque()
        """Episodes for which threads of closing ones leave no room yet."""
        self._started: set[str] = set()
        self._episodes = EpisodeThreads(
            setup.environments,
            TextTokenizer(_tokenizer(setup.student)),
            max_threads=setup.max_threads,
            stop_token_ids=setup.stop_token_ids,
            max_context_tokens=setup.max_context_tokens,
            wake=self._woken.set,
        )

    def run(self) -> None:
        """Until the other end asks for the end, or is gone. Raises TooManyStuck."""
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        self._link.send(Ready(self._episodes.agents))
        reported_s = 0.0
        while self._obey():
            while self._waiting and self._episodes.has_room:
                self._start(self._waiting.popleft())
            news, now_s = self._episodes.take(), time.monotonic()
            if news or now_s - reported_s >= BEAT_S:
                for one in news:
                    self._link.send(one)
                self._link.send(Gauges(self._episodes.gauges))
            if now_s - reported_s >= BEAT_S:
                # It needs no Python lock, so it also ends a process in which an environment keeps that lock.
                faulthandler.dump_traceback_later(self._silence_s, exit=True)
                reported_s = now_s
            self._woken.wait(0.05 if self._waiting else BEAT_S)
            self._woken.clear()
        self._episodes.close()

    def _obey(self) -> bool:
        """Carry out the commands; False when one of them says to end."""
        while not self._commands.empty():
            match self._commands.get():
                case EpisodeStart() as start:
                    self._waiting.append(start)
                case Finish(rollout_id):
                    if rollout_id in self._started:
                        self._started.discard(rollout_id)
                        self._episodes.finish(rollout_id)
                    self._waiting = deque(start for start in self._waiting if start.rollout_id != rollout_id)
                case Deliver() as one:
                    if one.rollout_id in self._started:
                        self._episodes.deliver(*one)
                case Refuse() as one:
                    if one.rollout_id in self._started:
                        self._episodes.refuse(*one)
                case Stop():
                    return False
                case Setup():
                    raise AssertionError("only the first message is one")
        return True

    def _start(self, start: EpisodeStart) -> None:
        self._episodes.start(start)
        self._started.add(start.rollout_id)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while not isinstance(command := cast("Command", self._link.receive()), Stop):
                self._commands.put(command)
                self._woken.set()
        # After the actor's end nobody else would notice a process that does not end by itself.
        leave = threading.Timer(CLOSE_TIMEOUT_S + 1.0, os._exit, (FAILED,))
        leave.daemon = True
        leave.start()
        self._commands.put(Stop())
        self._woken.set()


def _tokenizer(student: str) -> FileTokenizer:
    if model_file(student, "tokenizer.json") is not None:
        return FileTokenizer(student)
    from stillhouse.models.tokenizer import load_tokenizer

    return load_tokenizer(student)  # type: ignore[return-value] - has the same methods


def main(descriptor: int) -> int:
    """Entry of the process: `python -m stillhouse.actors.episode_process DESCRIPTOR`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the actor says when to end
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s")
    with socket.socket(fileno=descriptor) as end:
        link = Link(end)
        try:
            setup = link.receive()
            assert isinstance(setup, Setup)
            EpisodeHost(link, setup).run()
        except (EOFError, OSError):  # the actor has ended
            return FAILED
        except TooManyStuck as error:
            link.send(GaveUp(str(error)))
            return FAILED
        except Exception as error:
            log.exception("the environments' process cannot go on")
            link.send(GaveUp(f"{type(error).__name__}: {error}"))
            return FAILED
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of environments that do not return must not hold the process
