"""A run that broke off and may come back by --resume: waited for, and one account of all that was done in it.

stay -> the run ends otherwise than well, or cannot be reached -> look for it, again and again -> stay -> ...
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from launch.errors import ConfigError, LaunchError
from launch.join.status import JoinedWorker, JoinSummary
from launch.join.target import RunIsFinished
from launch.processes.signals import StopRequests, said_of
from launch.processes.slots import Ending
from protocol.context import ExitCode

LOOK_EVERY_S: Final = 1.0
NAP_S: Final = 0.05
"""How soon a signal is noticed between two looks."""
FoundT = TypeVar("FoundT")


def wait_for_run(look: Callable[[], FoundT], wait_s: float, stops: StopRequests) -> FoundT | Ending:
    """What `look` finds, or why it is not waited for any longer. `look` raises LaunchError where the run is not back
    (it is asked again, for `wait_s`), RunIsFinished or ConfigError where it never will be, or not for us."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return look()
        except RunIsFinished as error:
            return Ending(True, str(error), int(ExitCode.OK))
        except ConfigError as error:
            return Ending(False, f"the run is back, and is another: {error}", int(ExitCode.FAILED))
        except LaunchError as error:
            why = error
        look_at_s = time.monotonic() + LOOK_EVERY_S
        while time.monotonic() < look_at_s:
            if stops.count:
                assert stops.first is not None
                return Ending(False, f"stopped by {said_of(stops.first)} while the run was away", stops.exit_code)
            if time.monotonic() > deadline_s:
                return Ending(False, f"the run did not come back in {wait_s:g} s: {why}", int(ExitCode.FAILED))
            time.sleep(NAP_S)


def same_run(former_id: str, run_id: str) -> bool:
    """Of two launches: the ids of a run are its name and something random."""
    return former_id.rpartition("-")[0] == run_id.rpartition("-")[0]


def account(stays: Sequence[JoinSummary], ending: Ending, wall_s: float) -> JoinSummary:
    """Of all stays, oldest first. The buffer counts on for workers that come back to the same launch of the run, and
    anew in each launch."""
    tokens: defaultdict[str, dict[str, int]] = defaultdict(dict)
    done: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for stay in stays:
        for name, worker in stay.workers.items():
            tokens[name][stay.run_id] = max(worker.tokens, tokens[name].get(stay.run_id, 0))
            done[name][stay.run_id] = max(worker.done, done[name].get(stay.run_id, 0))
    return msgspec.structs.replace(
        stays[-1],
        ok=ending.ok,
        reason=ending.reason,
        exit_code=ending.exit_code,
        broke_off=stays[-1].broke_off and not ending.ok,
        wall_s=wall_s,
        ready_s=stays[0].ready_s,
        stays=len(stays),
        workers={
            name: JoinedWorker(
                tokens=sum(tokens[name].values()),
                done=sum(done[name].values()),
                restarts=sum(stay.workers[name].restarts for stay in stays),
                exit_codes=[code for stay in stays for code in stay.workers[name].exit_codes],
            )
            for name in stays[-1].workers
        },
    )
