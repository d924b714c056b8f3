"""Composes summary.json, the account that a run leaves in its folder. launch.report.summary_table shows it.

Inputs: the supervisor's RunOutcome; ledger.json, the final Snapshot that the buffer writes; learner.json, the learner's
own account. Each may be missing, because a worker may be killed at any moment. Without ledger.json the last snapshot
that the launcher saw is used, and the summary says so. Paths inside the run folder are relative to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import unwritten
from stillhouse.launch.processes.slots import Ending, RunOutcome, ServerAccount
from stillhouse.launch.report.figures import guests, learner_stats, staleness
from stillhouse.launch.runfolder import ALARM_EXIT_CODE, EndState, RunFolder, end_state
from stillhouse.learner.checkpoints.files import CHECKPOINTS, damaged, newest
from stillhouse.learner.evaluation.figures import EvalPoint, MeasuredTeacher
from stillhouse.learner.reports.alarms import Alarm
from stillhouse.learner.reports.sample import Sample
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.messages import ForgottenPeers, Ledger, LedgerCounts, Role, Snapshot

UNBALANCED_EXIT_CODE = 3
NO_COUNTS = LedgerCounts(accepted=0, trained=0, masked={}, dropped={}, waiting=0, in_flight=0)
NO_LEDGER = Ledger(NO_COUNTS, NO_COUNTS, NO_COUNTS, {}, NO_COUNTS)
log = logging.getLogger(__name__)
StructT = TypeVar("StructT", bound=msgspec.Struct)


class LearnerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the learner's time, from its last start to its last step."""

    busy_fraction: float = 0.0
    wait_fraction: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """By cause."""


Saved: TypeAlias = Literal["checkpoint", "average"]


class LearnerAccount(msgspec.Struct, frozen=True, kw_only=True):
    """learner.json, which the learner writes at its end and with each checkpoint."""

    steps: int = 0
    eval: tuple[EvalPoint, ...] = ()
    eval_sets: tuple[EvalPoint, ...] = ()
    """Evaluations on the sets of learner.eval_sets, by name and step."""
    learner: LearnerTimes = msgspec.field(default_factory=LearnerTimes)
    versions_published: int = 0
    tokens_trained: int | None = None
    """Sampled tokens that the student at the end was trained on, in all launches. `tokens.trained` also has those of
    steps that a restart took back. None: not known."""
    tokens_trained_offline: int = 0
    """Tokens of text written by the teacher; they are not in the ledger."""
    reverse_kl_first: float | None = None
    """At this launch's first optimizer step."""
    reverse_kl_last: float | None = None
    bound: str = ""
    """What limited the speed of this launch (learner.reports.attribution)."""
    efficiency: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Figures by tag, over this launch; docs/metrics.md explains them."""
    flops: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Role -> floating-point operations of its models, over this launch (stillhouse.models.flops)."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms of the run (learner.reports.alarms)."""
    stopped_by_alarm: bool = False
    changes: Mapping[str, tuple[float, float]] = msgspec.field(default_factory=dict[str, tuple[float, float]])
    """Figures of the training rollouts by tag: means over the first five steps of the run, and over its last five."""
    sample: Sample | None = None
    """A rollout of the newest step."""
    checkpoint: str | None = None
    """Hugging Face folder of the last student; None when this launch wrote none."""
    checkpoint_error: str = ""
    """Why the newest checkpoint that could not be written could not."""
    average_error: str = ""
    """Why the newest average of the student that its teachers did not get is not there (learner.ema)."""
    tensorboard: str | None = None
    """Folder of the event files."""


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens of train rollouts. `balanced`: the whole ledger balances, in every unit."""

    accepted: int
    trained: int
    masked: dict[str, int]
    dropped: dict[str, int]
    waiting: int
    in_flight: int
    balanced: bool


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Staleness of the trained tokens, in optimizer steps."""

    max: int
    mean: float
    bound: int


class TeacherNoise(msgspec.Struct, frozen=True, kw_only=True):
    """Noise in the teachers' log-probs, in nats (teachers.self_check)."""

    batch: float
    """Largest change of a token's log-prob with the other texts in its batch, over all teachers."""
    teachers: float | None
    """Spread of the mean log-probs that teachers of one model give a fixed text; None with several models, or a single
    teacher."""


class WorkerAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one worker over all its processes."""

    role: str
    tokens: int
    """Sampled tokens accepted from an actor, scored by a teacher, or trained by the learner."""
    done: int
    """Rollouts finished, items scored, batches trained."""
    restarts: int
    exit_codes: list[int]
    joined: bool = False
    """Started by another launcher; its restarts and exit codes are not known here."""


class FailedRollouts(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of this launch that failed for one reason; `examples` are the first distinct texts."""

    n: int
    newest: str
    examples: tuple[str, ...]


class LedgerAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The other units of the ledger."""

    source: Literal["final", "last_seen", "none"]
    """final: written by the buffer at its end; last_seen: the launcher's last snapshot, because the buffer died."""
    rollouts: LedgerCounts
    segments: LedgerCounts
    eval_tokens: LedgerCounts
    rejected: dict[str, int]


class _GpuTime(msgspec.Struct, frozen=True):
    """What summary.json says of a launch and those before it."""

    gpu_hours: float = 0.0
    gpu_cost: float = 0.0


class Summary(LearnerAccount, frozen=True, kw_only=True):
    """summary.json. `steps`, `eval` and `eval_sets` cover all launches of the run; `checkpoint` is the newest of
    any launch."""

    name: str
    run_id: str
    ok: bool
    """The run finished."""
    state: EndState
    reason: str
    exit_code: int
    first_step: int = 0
    """Step that this launch went on from; `wall_s`, `ready_s` and `peak_memory_bytes` are of this launch alone."""
    wall_s: float
    gpus: int = 0
    """Those that this launch placed something on; joined workers are not among them."""
    gpu_hours: float = 0.0
    """`gpus` times `wall_s`, with those of earlier launches that left a summary."""
    gpu_cost: float = 0.0
    """These hours, each at launch.gpu_hour_price of its launch."""
    ready_s: float | None
    peak_memory_bytes: int
    """Largest sampled sum of PSS over the process tree."""
    tokens: TokenCounts
    staleness: Staleness
    actors: int
    teachers: int
    teacher_accuracy: Mapping[str, MeasuredTeacher] = msgspec.field(default_factory=dict[str, MeasuredTeacher])
    """By pool, on this run's evaluation prompts; empty when not measured (launch.report.teacher_accuracy)."""
    teacher_noise: TeacherNoise | None
    checkpoints_damaged: tuple[str, ...] = ()
    """Checkpoints that could not be read on --resume; older ones were used."""
    ledger: LedgerAccount
    workers: dict[str, WorkerAccount]
    forgotten: Mapping[Role, ForgottenPeers] = msgspec.field(default_factory=dict[Role, ForgottenPeers])
    """By role, totals of joined workers that left long before the end and are no longer listed in `workers`."""
    servers: dict[str, ServerAccount] = msgspec.field(default_factory=dict[str, ServerAccount])
    failed_rollouts: dict[str, FailedRollouts] = msgspec.field(default_factory=dict[str, FailedRollouts])
    """By reason; the most recent reason is last."""


def write_summary(
    config: RunConfig, folder: RunFolder, outcome: RunOutcome, *, first_step: int = 0, gpus: int = 0
) -> Summary:
    """Compose and write summary.json. An unbalanced ledger makes the run a failure with exit code 3. `first_step`: that
    of the checkpoint that this launch went on from. `gpus`: how many it has."""
    final = _read(folder.path / "ledger.json", Snapshot)
    snapshot = final or outcome.snapshot
    account = _read(folder.path / "learner.json", LearnerAccount) or _account_from(snapshot)
    ending = judge(outcome.ending, final, snapshot)
    if account.stopped_by_alarm and ending.exit_code == 1:
        ending = ending._replace(exit_code=ALARM_EXIT_CODE)
    ledger = snapshot.ledger if snapshot is not None else NO_LEDGER
    mean, top = staleness(snapshot.staleness_hist) if snapshot is not None else (0.0, 0)
    found = newest(folder.path / CHECKPOINTS)
    spent = _gpu_time(folder, gpus * outcome.wall_s / 3600, config.launch.gpu_hour_price)
    account = msgspec.structs.replace(
        account,
        efficiency=account.efficiency | _pauses(snapshot),
        eval=_former_evaluations(folder, account, "eval") + account.eval,
        eval_sets=_former_evaluations(folder, account, "eval_sets") + account.eval_sets,
        checkpoint=_inside(folder, account.checkpoint or found),
        tensorboard=_inside(folder, account.tensorboard),
    )
    summary = Summary(
        **msgspec.structs.asdict(account),
        name=folder.record.name,
        run_id=folder.record.run_id,
        ok=ending.ok,
        state=end_state(ending.exit_code),
        reason=ending.reason,
        exit_code=ending.exit_code,
        first_step=first_step,
        wall_s=outcome.wall_s,
        gpus=gpus,
        gpu_hours=spent.gpu_hours,
        gpu_cost=spent.gpu_cost,
        ready_s=outcome.ready_s,
        peak_memory_bytes=outcome.peak_memory_bytes,
        tokens=TokenCounts(**msgspec.structs.asdict(ledger.tokens), balanced=ledger.balanced),
        staleness=Staleness(max=top, mean=mean, bound=config.buffer.max_staleness),
        actors=config.actors,
        teachers=config.teachers,
        teacher_noise=teacher_noise(snapshot, one_model=not config.pools),
        checkpoints_damaged=tuple(_inside(folder, path) or "" for path in damaged(folder.path / CHECKPOINTS)),
        ledger=LedgerAccount(
            source="final" if final is not None else "last_seen" if snapshot is not None else "none",
            rollouts=ledger.rollouts,
            segments=ledger.segments,
            eval_tokens=ledger.eval_tokens,
            rejected=ledger.rejected,
        ),
        workers=_workers(outcome, snapshot),
        forgotten=snapshot.forgotten if snapshot is not None else {},
        servers=dict(outcome.servers),
        failed_rollouts={
            each.reason: FailedRollouts(n=each.n, newest=each.newest, examples=each.examples)
            for each in (snapshot.failures if snapshot is not None else ())
        },
    )
    _write(summary, folder)
    return summary


def _inside(folder: RunFolder, path: str | Path | None) -> str | None:
    """The path relative to the run folder if it lies inside, because the folder may be mounted or moved elsewhere."""
    if path is None:
        return None
    return str(Path(path).relative_to(folder.path) if Path(path).is_relative_to(folder.path) else path)


def add_teachers(summary: Summary, folder: RunFolder, measured: Mapping[str, MeasuredTeacher]) -> Summary:
    """Add the measured accuracies of the teachers, if any, and write the summary again."""
    if not measured:
        return summary
    summary = msgspec.structs.replace(summary, teacher_accuracy=measured)
    _write(summary, folder)
    return summary


def _write(summary: Summary, folder: RunFolder) -> None:
    file = folder.path / "summary.json"
    try:
        write_atomic(file, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    except OSError as error:  # the table on the terminal has most of it
        unwritten(file, error)


def judge(ending: Ending, final: Snapshot | None, snapshot: Snapshot | None) -> Ending:
    """The run's ending in view of its ledger. An unbalanced ledger outranks everything else."""
    if snapshot is not None and not snapshot.ledger.balanced:
        return Ending(False, f"THE LEDGER DOES NOT BALANCE ({ending.reason})", UNBALANCED_EXIT_CODE)
    if ending.ok and final is None:
        return Ending(False, "the run ended well, but the buffer left no ledger.json", 1)
    return ending


def save_error(run_dir: Path, what: Saved) -> str:
    """Why the learner's newest one that failed did so, by its account."""
    account = _read(run_dir / "learner.json", LearnerAccount)
    if account is None:
        return ""
    return account.checkpoint_error if what == "checkpoint" else account.average_error


def _pauses(snapshot: Snapshot | None) -> dict[str, float]:
    """The mean pause of an engine, by what the actors said last: the learner ends before the last swap."""
    stats = [peer.stats for peer in snapshot.peers if peer.role == "actor"] if snapshot is not None else []
    n, seconds = (sum(one.get(f"weight_{name}_total", 0.0) for one in stats) for name in ("pauses", "pause_s"))
    return {"efficiency/weight_pause_s": seconds / n} if n else {}


def read_sample(run_dir: Path) -> Sample | None:
    """The newest that the learner wrote."""
    account = _read(run_dir / "learner.json", LearnerAccount)
    return account.sample if account is not None else None


def _account_from(snapshot: Snapshot | None) -> LearnerAccount:
    """Stands in for learner.json when the learner was killed: what the buffer knows of it."""
    if snapshot is None:
        return LearnerAccount()
    stats = learner_stats(snapshot) or {}
    waits = {
        key.removeprefix("wait_").removesuffix("_fraction"): value
        for key, value in stats.items()
        if key.startswith("wait_")
    }
    return LearnerAccount(
        steps=snapshot.version.step,
        learner=LearnerTimes(busy_fraction=stats.get("busy_fraction", 0.0), wait_fraction=waits),
    )


def _gpu_time(folder: RunFolder, hours: float, price: float) -> _GpuTime:
    """This launch's hours, and what the newest summary of an earlier one says."""
    earlier = [_read(folder.path / f"summary.{n}.json", _GpuTime) for n in range(1, folder.record.launches)]
    before = next((one for one in reversed(earlier) if one is not None), _GpuTime())
    return _GpuTime(before.gpu_hours + hours, before.gpu_cost + hours * price)


def _read(file: Path, struct: type[StructT]) -> StructT | None:
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=struct)
    except msgspec.DecodeError as error:
        log.error("%s cannot be read and is left out of the summary: %s", file, error)
        return None


def _former_evaluations(
    folder: RunFolder, account: LearnerAccount, field: Literal["eval", "eval_sets"]
) -> tuple[EvalPoint, ...]:
    """Evaluations of earlier launches (`--resume`) before the first one of this launch, so that the summary covers the
    whole run."""
    points: dict[tuple[str, int], EvalPoint] = {}
    for launch in range(1, folder.record.launches):
        former = _read(folder.path / f"learner.{launch}.json", LearnerAccount)
        points |= {(p.name, p.step): p for p in getattr(former, field)} if former is not None else {}
    now: tuple[EvalPoint, ...] = getattr(account, field)
    first = min((point.step for point in now), default=account.steps + 1)
    return tuple(point for (_, step), point in sorted(points.items()) if step < first)


def _workers(outcome: RunOutcome, snapshot: Snapshot | None) -> dict[str, WorkerAccount]:
    peers = {peer.name: peer for peer in snapshot.peers} if snapshot is not None else {}
    accounts: dict[str, WorkerAccount] = {}
    for name, exit_codes in outcome.exit_codes.items():
        peer = peers.get(name)
        accounts[name] = WorkerAccount(
            role=name.rpartition("-")[0],
            tokens=peer.tokens_total if peer is not None else 0,
            done=peer.done_total if peer is not None else 0,
            restarts=outcome.restarts.get(name, 0),
            exit_codes=exit_codes,
        )
    for peer in guests(peers.values(), accounts):
        accounts[peer.name] = WorkerAccount(
            role=peer.role, tokens=peer.tokens_total, done=peer.done_total, restarts=0, exit_codes=[], joined=True
        )
    return accounts


def teacher_noise(snapshot: Snapshot | None, *, one_model: bool) -> TeacherNoise | None:
    """Computed from what the teachers measured at their start (teachers.self_check); None when none did."""
    stats = [peer.stats for peer in snapshot.peers if peer.role == "teacher"] if snapshot is not None else []
    noise = [one["noise_nats"] for one in stats if "noise_nats" in one]
    logprobs = [one["check_logprob"] for one in stats if "check_logprob" in one]
    if not noise:
        return None
    spread = max(logprobs) - min(logprobs) if one_model and len(logprobs) > 1 else None
    return TeacherNoise(batch=max(noise), teachers=spread)
