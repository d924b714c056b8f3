"""The buffer's core under simulated peers: random interleavings of everything that can happen, checked at every event.

    python bench/buffer_sim.py --events 1000000 --seed 0

Each chapter of a few thousand events is a new buffer with other settings (staleness bound, release policy, batch and
group size, teacher pools); it ends with everybody working together (batches must come) and RunFinished (nothing may be
left). After every event: the ledger balances in all units and agrees with an account kept from the messages alone, the
pacing bound holds; after every batch: no token is too stale, trained before, or not the student's (`buffer_model`).
Every `--check-every` events all of the buffer's incremental counts are recounted from its records.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from random import Random

from bench.buffer_actions import ACTIONS, finish, work_together
from bench.buffer_world import World
from buffer.config import BufferConfig, Release

EVENTS_PER_CHAPTER = 5_000
RELEASES: tuple[Release, ...] = ("rollout", "segment", "deadline")


def random_world(rng: Random, check_every: int) -> World:
    """Small enough that looking at everything after each event is cheap."""
    config = BufferConfig(
        max_staleness=rng.randrange(5),
        batch_rollouts=rng.choice((2, 3, 4, 6)),
        release=rng.choice(RELEASES),
        idle_release_s=rng.choice((0.5, 2.0)),
        lease_s=30.0,
        ticket_timeout_s=100.0,
        max_attempts=rng.choice((1, 2, 3)),
        max_score_attempts=rng.choice((1, 2, 4)),
        task_queue=4,
        max_segment_tokens=32,
        max_rollout_tokens=400,
        max_held_segments=rng.choice((1, 4)),
    )
    pools = rng.choice(((("default", 2),), (("default", 1), ("other", 2))))
    names = tuple(name for name, _ in pools)
    most = (config.max_staleness + 1) * config.batch_rollouts
    return World(
        config,
        n_actors=rng.choice((1, 3, 5)),
        pools=pools,
        task_teachers=rng.choice(((names,), (("default",),), ((), names, names[::-1]))),
        group_sizes=rng.choice(((1,), (2,), (1, 2), (min(4, most),))),
        check_every=check_every,
    )


def run(events: int, seed: int, check_every: int = 1) -> Counter[str]:
    """Simulate at least `events` events. Raises AssertionError at the first violation, naming the chapter's seed."""
    totals = Counter[str]()
    actions = [action for action, _ in ACTIONS]
    weights = [weight for _, weight in ACTIONS]
    chapter = 0
    while totals["events"] < events:
        chapter_seed = f"{seed}/{chapter}"
        rng = Random(chapter_seed)
        world = random_world(rng, check_every)
        budget = min(EVENTS_PER_CHAPTER, events - totals["events"])
        try:
            while world.tally.events < budget:
                for action in rng.choices(actions, weights, k=64):
                    action(world, rng)
            work_together(world, rng, batches=2)
            finish(world, rng)
        except Exception as error:
            raise AssertionError(f"chapter {chapter_seed}, event {world.tally.events}, {world.config}") from error
        ledger = world.state.snapshot(world.now_s).ledger
        totals += Counter(
            events=world.tally.events,
            chapters=1,
            deaths=world.tally.deaths,
            learner_restarts=world.tally.restarts,
            tokens_accepted=ledger.tokens.accepted,
            tokens_trained=ledger.tokens.trained,
            tokens_evaluated=ledger.eval_tokens.trained,
            segments_rejected=sum(ledger.rejected.values()),
        )
        totals += Counter({f"tokens_masked:{reason}": n for reason, n in ledger.tokens.masked.items()})
        totals += Counter({f"tokens_dropped:{reason}": n for reason, n in ledger.tokens.dropped.items()})
        chapter += 1
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=10, help="events between two audits of all records")
    options = parser.parse_args()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    totals = run(options.events, options.seed, options.check_every)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    for name, n in sorted(totals.items()):
        print(f"{name:40} {n:>12,}")
    print(f"{'events/s':40} {totals['events'] / seconds:>12,.0f}   in {seconds:.1f} s")
    print(f"{'events/CPU s':40} {totals['events'] / cpu_s:>12,.0f}   in {cpu_s:.1f} CPU s")
    print(f"ledger and model compared after each event, records audited every {options.check_every} events")


if __name__ == "__main__":
    main()
