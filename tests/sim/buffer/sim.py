"""The buffer's core under simulated peers: random interleavings of everything that can happen, checked at every event.

Each chapter of a few thousand events is a new buffer with other settings (staleness bound, release policy, batch and
group size, teacher pools, hedges, breakers, how many departed peers are remembered). Actors and the learner die, lie
and come back; teachers do too, and are slow, sick, stuck, or leave in good order; some items are more than any teacher
can take. In half of the chapters the buffer is restarted from its journal now and then, and must come back as the same
bytes; what its image does not refer to is deleted then. In two thirds, small arrays are blobs, too. A chapter ends with
everybody working together (batches must come) and RunFinished (nothing may be left).

After every event: the ledger balances in all units and agrees with an account kept from the messages alone, the pacing
bound holds, hedges are accounted for; no lease goes where it may not (`buffer_teacher_model`); in every batch no token
is too stale, trained before, or not the student's (`buffer_model`). Every `--check-every` events all of the buffer's
incremental counts are recounted from its records.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import repeat
from random import Random

from stillhouse.buffer import blobs, pacing
from stillhouse.buffer.config import BufferConfig, Release
from stillhouse.buffer.peers import PeerTable
from tests.sim.buffer.actions import ACTIONS, finish, work_together
from tests.sim.buffer.world import World

EVENTS_PER_CHAPTER = 5_000
_ACTIONS = [action for action, _ in ACTIONS]
_WEIGHTS = [weight for _, weight in ACTIONS]
RELEASES: tuple[Release, ...] = ("rollout", "segment", "deadline")


def random_world(rng: Random, check_every: int) -> World:
    """Small enough that looking at everything after each event is cheap."""
    release = rng.choice(RELEASES)
    by_group = release == "rollout" and rng.random() < 0.7
    config = BufferConfig(
        max_staleness=rng.randrange(5),
        batch_rollouts=rng.choice((2, 3, 4, 6)),
        release=release,
        dynamic_sampling=10 if by_group else 0,
        mask_truncated=release == "rollout" and rng.random() < 0.5,
        idle_release_s=rng.choice((0.5, 2.0)),
        lease_s=30.0,
        hedge_multiple=rng.choice((0.0, 1.0, 1.5, 3.0)),
        hedge_floor_s=rng.choice((0.0, 0.2)),
        hedge_budget=rng.choice((0.05, 0.3, 1.0)),
        breaker_failures=rng.choice((0, 1, 2, 3)),
        breaker_backoff_s=rng.choice((0.05, 0.1)),
        ticket_timeout_s=100.0,
        max_attempts=rng.choice((1, 2, 3)),
        max_score_attempts=rng.choice((1, 2, 4)),
        task_queue=4,
        max_segment_tokens=32,
        max_rollout_tokens=400,
        max_held_segments=rng.choice((1, 4)),
    )
    pools = rng.choice(((("default", 2),), (("default", 4),), (("default", 1), ("other", 3))))
    names = tuple(name for name, _ in pools)
    # Groups of one have equal rewards always: nothing would ever be trained.
    sizes = ((2,), (2, 3)) if by_group else ((1,), (2,), (1, 2))
    most = (config.max_staleness + 1) * config.batch_rollouts
    return World(
        config,
        n_actors=rng.choice((1, 3, 5)),
        pools=pools,
        task_teachers=rng.choice(((names,), (("default",),), ((), names, names[::-1]))),
        group_sizes=rng.choice((*(tuple(min(n, most) for n in some) for some in sizes), (min(4, most),))),
        check_every=check_every,
        journal=rng.random() < 0.5,
        learner_dies_often=rng.random() < 0.5,
    )


def _work_quietly() -> None:
    """Leave Ctrl-C to the parent process, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def chapter(seed: str, events: int, check_every: int) -> Counter[str]:
    """One buffer's life. Raises AssertionError at the first violation, naming the chapter's seed."""
    rng = Random(seed)
    world = random_world(rng, check_every)
    remembered, PeerTable.remembered = PeerTable.remembered, rng.choice((1, 2, 256))
    stale_share, waited_share = pacing.STALE_SHARE, pacing.WAITED_SHARE
    if zlib.crc32(seed.encode()) // 3 % 3 == 0:  # what may be out falls whenever it may, to what is out or less
        pacing.STALE_SHARE, pacing.WAITED_SHARE = -1.0, math.inf  # pyright: ignore[reportConstantRedefinition]
    blob_bytes, blobs.BLOB_BYTES = blobs.BLOB_BYTES, (1, 24, blobs.BLOB_BYTES)[zlib.crc32(seed.encode()) % 3]  # pyright: ignore[reportConstantRedefinition]
    try:
        while world.tally.events < events:
            for action in rng.choices(_ACTIONS, _WEIGHTS, k=64):
                action(world, rng)
        work_together(world, rng, batches=2)
        finish(world, rng)
    except Exception as error:
        raise AssertionError(f"chapter {seed}, event {world.tally.events}, {world.config}: {error}") from error
    finally:
        pacing.STALE_SHARE, pacing.WAITED_SHARE = stale_share, waited_share  # pyright: ignore[reportConstantRedefinition]
        PeerTable.remembered = remembered
        blobs.BLOB_BYTES = blob_bytes  # pyright: ignore[reportConstantRedefinition]
    snapshot = world.state.snapshot(world.now_s)
    ledger, queues = snapshot.ledger, snapshot.queues
    counts = Counter(
        events=world.tally.events,
        chapters=1,
        deaths=world.tally.deaths,
        learner_restarts=world.tally.restarts,
        buffer_restarts=world.tally.buffer_restarts,
        teacher_drains=world.tally.drains,
        peers_forgotten=sum(sums.n for sums in snapshot.forgotten.values()),
        breakers_opened=queues["breakers_opened_total"],
        breaker_probes=queues["breaker_probes_total"],
        hedges_sent=queues["hedges_sent_total"],
        hedges_won=queues["hedges_won_total"],
        tokens_accepted=ledger.tokens.accepted,
        tokens_trained=ledger.tokens.trained,
        tokens_evaluated=ledger.eval_tokens.trained,
        segments_rejected=sum(ledger.rejected.values()),
    )
    counts += Counter(
        {name.removesuffix("_total"): n for name, n in queues.items() if name.startswith("leases_wasted")}
    )
    counts += Counter({f"tokens_masked:{reason}": n for reason, n in ledger.tokens.masked.items()})
    return counts + Counter({f"tokens_dropped:{reason}": n for reason, n in ledger.tokens.dropped.items()})


def run(events: int, seed: int, check_every: int = 1, jobs: int = 1, progress_s: float = math.inf) -> Counter[str]:
    """Simulate at least `events` events, a line of progress every `progress_s`. The chapters are the same for any
    number of `jobs` (processes). Ctrl-C ends it with what there is. Raises AssertionError as `chapter` does."""
    budgets = [EVENTS_PER_CHAPTER] * (events // EVENTS_PER_CHAPTER)
    budgets += [events % EVENTS_PER_CHAPTER] if events % EVENTS_PER_CHAPTER else []
    seeds = [f"{seed}/{i}" for i in range(len(budgets))]
    totals = Counter[str]()
    began_s = told_s = time.monotonic()
    with ExitStack() as stack:
        if jobs == 1:
            chapters = map(chapter, seeds, budgets, repeat(check_every))
        else:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _work_quietly))
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            chapters = pool.map(chapter, seeds, budgets, repeat(check_every))
        try:
            for counts in chapters:
                totals += counts
                now_s = time.monotonic()
                if now_s - told_s >= progress_s:
                    told_s = now_s
                    print(f"{now_s - began_s:7.0f} s  {totals['events']:>12,} events, nothing broken", flush=True)
        except KeyboardInterrupt:
            print(f"stopped after {totals['events']:,} of {events:,} events", flush=True)
    return totals
