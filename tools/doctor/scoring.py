"""Checks of log-probs: off by one, temperature, a teacher that knows nothing, and noise.

Log-probs of the run's engines are compared with those of tools.doctor.reference, token by token. Differences are
means of absolute values, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stillhouse.launch.checks.finding import Finding, Status
from stillhouse.launch.config.pools import TeacherPool
from stillhouse.teachers.self_check import LOUD_NATS
from stillhouse.tools.doctor import engines
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.scored import TEMPERATURES, TextScores, reference_scores, scores, texts
from stillhouse.tools.doctor.written import GREEDY, PROBE, answers, of_student, written

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
EXACT_NATS: Final = (2e-3, 0.02)
"""Mean difference from the reference up to which all is well, and above which it is a failure: in float32 on a CPU."""
ROUNDED_NATS: Final = (0.1, 0.3)
"""In 16 bits, where the logits themselves are rounded by 0.03 to 0.06."""
KNOWS: Final = (0.3, 0.1)
"""Nats above uniform, as a share of log V, from which on the teacher knows the text, and below which it does not."""
LOUD_SHARE: Final = 0.1
"""Noise, as a share of the mean difference of student and teacher, above which it is worth a warning."""
NO_SIGNAL_NATS: Final = 1e-3
"""Mean difference of student and teacher below which they are the same model."""


def off_by_one(case: ModelCase) -> Iterator[Finding]:
    """Each log-prob belongs to its token: those of the actor's samples, and the teachers' scores."""
    ones = [(one, table) for one, table in zip(answers(case), of_student(case), strict=True) if one.temperature == 1.0]
    yield _aligned(
        case,
        "actor",
        "actor",
        np.concatenate([one.logprobs for one, _ in ones]),
        np.concatenate([table[0] for _, table in ones]),
        "",
    )
    for pool in case.pools:
        got = scores(case, pool)
        expected = [table[0] for table in reference_scores(case, pool)]
        yield _aligned(
            case,
            pool.key,
            f"pool {pool.name}",
            np.concatenate(_all_scores(case, got)),
            np.concatenate(_as_asked(case, expected)),
            f", {got.of_nothing} for no token" if got.of_nothing else "",
        )


def _all_scores(case: ModelCase, got: TextScores) -> list[Floats]:
    return [*got.alone, *got.among, *got.grown]


def _as_asked(case: ModelCase, expected: Sequence[Floats]) -> list[Floats]:
    """The reference's log-probs in the order of `_all_scores`."""
    answered = [table[text.start - 1 :] for text, table in zip(texts(case), expected, strict=True)]
    return [*expected, *answered, *answered]


def _aligned(case: ModelCase, key: str, subject: str, got: Floats, expected: Floats, wrong: str) -> Finding:
    fine, _ = limits(case, key)
    if len(got) != len(expected):
        apart, status = math.inf, "failed"
        measured = f"got {len(got)} log-probs for {len(expected)} tokens"
    else:
        apart = _apart(got, expected)
        status = "failed" if wrong else _status(apart, *limits(case, key))
        first = abs(float(got[0]) - float(expected[0]))
        measured = (
            f"{len(got)} log-probs are {apart:.2g} nats from our own forward pass on average, the first token's "
            f"{first:.2g}"
        )
        if status != "ok":
            measured += _shift(got, expected, fine)
    return Finding(
        check="off by one",
        subject=subject,
        status=status,
        measured=measured + wrong,
        normal=f"at most {fine:g} nats, and no log-prob for no token",
        advice="the engine's log-probs belong to other tokens, or it has other weights than the folder: compare its "
        "first log-prob (of the second token) with what it should be; an empty answer must give none",
        figures={"mean_nats": apart} if math.isfinite(apart) else {},
    )


def _shift(got: Floats, expected: Floats, fine: float) -> str:
    """The shift that explains a difference."""
    for name, apart in (("before", _apart(got[1:], expected[:-1])), ("after", _apart(got[:-1], expected[1:]))):
        if apart <= max(fine, 0.2 * _apart(got, expected)):
            return f"; they are those of the token {name} ({apart:.2g} nats apart)"
    return ""


def temperature(case: ModelCase) -> Iterator[Finding]:
    """Reported log-probs of samples are at the sampling temperature, scores at 1."""
    refused = written(case).refused
    yield _refuses(case, refused) if refused else _sampled_at(case)
    for pool in case.pools:
        yield _scored_at(case, pool)


def _refuses(case: ModelCase, why: str) -> Finding:
    """An engine that takes one temperature only is fine for a run at that one."""
    asked = case.config.learner.tasks.temperature
    return Finding(
        check="temperature",
        subject="actor",
        status="ok" if asked == 1.0 else "failed",
        measured=f"the engine refuses temperature {PROBE:g}: {why}",
        normal=f"it samples at learner.tasks.temperature = {asked:g}, and reports log-probs at it",
        advice="let the engine report log-probs of the distribution that it samples from, or set "
        "learner.tasks.temperature = 1",
    )


def _sampled_at(case: ModelCase) -> Finding:
    pairs = zip(answers(case), of_student(case), strict=True)
    probed = [(one, table) for one, table in pairs if one.temperature == PROBE]
    got = np.concatenate([one.logprobs for one, _ in probed])
    at_1, at_asked = (np.concatenate([table[i] for _, table in probed]) for i in (0, 1))
    apart, from_1 = _apart(got, at_asked), _apart(got, at_1)
    ignores = from_1 < apart / 2
    status = "failed" if ignores else _status(apart, *limits(case, "actor"))
    return Finding(
        check="temperature",
        subject="actor",
        status=status,
        measured=f"log-probs of tokens sampled at temperature {PROBE:g} are {apart:.2g} nats from those of "
        f"softmax(z / {PROBE:g}), and {from_1:.2g} from those at temperature 1"
        + ("; the engine reports them at temperature 1" if ignores else ""),
        normal=f"at most {limits(case, 'actor')[0]:g} nats from those at the sampling temperature",
        advice="let the engine report log-probs of the distribution that it samples from (SGLang: without "
        "SGLANG_RETURN_ORIGINAL_LOGPROB); importance ratios would be wrong",
        figures={"mean_nats": apart, "from_temperature_1_nats": from_1},
    )


def _scored_at(case: ModelCase, pool: TeacherPool) -> Finding:
    tables = reference_scores(case, pool)
    got = np.concatenate(scores(case, pool).alone)
    by_temperature = [_apart(got, np.concatenate([table[k] for table in tables])) for k in range(len(TEMPERATURES))]
    best = TEMPERATURES[int(np.argmin(by_temperature))]
    at_1 = np.concatenate([table[0] for table in tables])
    factor = float(got @ at_1 / (at_1 @ at_1))
    fine, _ = limits(case, pool.key)
    divided = by_temperature[0] > fine and _apart(got, factor * at_1) <= fine
    status = "failed" if divided or (best != 1.0 and by_temperature[0] > fine) else "ok"
    fits = f"they are {factor:.2f} times those at temperature 1, as if divided by {1 / factor:.2f}" if divided else (
        f"they fit temperature {best:g} best"
    )  # fmt: skip
    return Finding(
        check="temperature",
        subject=f"pool {pool.name}",
        status=status,
        measured=f"scores are {by_temperature[0]:.2g} nats from those at temperature 1; {fits}",
        normal=f"at most {fine:g} nats from temperature 1, where student and teacher are compared, and no other fits "
        "better",
        advice="let the engine score given tokens by softmax(z), whatever the sampling temperature is",
        figures={"mean_nats": by_temperature[0], "best_temperature": best, "factor": factor},
    )


def known_text(case: ModelCase) -> Iterator[Finding]:
    """The teacher gives known text a much higher probability than chance."""
    own = answers(case)
    for pool in case.pools:
        got, asked = scores(case, pool), texts(case)
        greedy = [got.among[i] for i, one in enumerate(own) if one.temperature == GREEDY]
        truths = got.among[len(own) : len(asked)]
        uniform = -math.log(got.vocab_tokens)
        by_kind = {"what the student writes greedily": greedy, "the rows' ground truths": truths}
        means = {kind: float(np.concatenate(found).mean()) for kind, found in by_kind.items() if found}
        best = max(means, key=lambda kind: means[kind])
        share = (means[best] - uniform) / -uniform
        measured = ", ".join(f"{mean:.2f} of {kind}" for kind, mean in means.items())
        yield Finding(
            check="known text",
            subject=f"pool {pool.name}",
            status="ok" if share >= KNOWS[0] else "warning" if share >= KNOWS[1] else "failed",
            measured=f"mean log-prob {measured}; uniform over {got.vocab_tokens:,} tokens would be {uniform:.2f}",
            normal=f"at least {(1 - KNOWS[0]) * uniform:.2f} for one of them",
            advice="the teacher seems to run on random weights, or reads something unfamiliar: look for a load option "
            "left at dummy, the wrong folder, or a chat template that it does not know",
            figures={"mean_logprob": means[best], "uniform_logprob": uniform},
        )


def replica_noise(case: ModelCase) -> Iterator[Finding]:
    """A token's score must not depend on its batch or its teacher by as much as student and teacher differ."""
    for pool in case.pools:
        sampled = [i for i, one in enumerate(answers(case)) if one.temperature == 1.0]
        first = scores(case, pool)
        noise = [abs(first.among[i].astype(np.float64) - _answer(case, first.alone, i)) for i in sampled]
        other = [scores(case, pool, offset) for offset in range(1, engines.replicas(case, pool))]
        noise += [abs(_answer(case, one.alone, i) - _answer(case, first.alone, i)) for one in other for i in sampled]
        yield _beside_signal(case, pool, np.concatenate(noise), sampled, 1 + len(other))


def _answer(case: ModelCase, alone: Sequence[Floats], i: int) -> npt.NDArray[np.float64]:
    return alone[i][texts(case)[i].start - 1 :].astype(np.float64)


def _beside_signal(case: ModelCase, pool: TeacherPool, noise: Floats, sampled: Sequence[int], replicas: int) -> Finding:
    """`noise`: absolute differences. The signal: s - q of sampled tokens, as the objective uses it."""
    s = np.concatenate([of_student(case)[i][0] for i in sampled])
    q = np.concatenate([_answer(case, scores(case, pool).alone, i) for i in sampled])
    kl, signal, mean = float((s - q).mean()), float(np.abs(s - q).mean()), float(noise.mean())
    status: Status = "ok"
    advice = (
        "let teachers compute in float32, turn off what depends on the batch, or give all replicas the same settings"
    )
    if signal < NO_SIGNAL_NATS:
        own = case.config.learner.ema.decay > 0 or case.config.learner.tasks.has_privileged
        status = "ok" if own else "warning"
        advice = "student and teacher are the same model: there is nothing to learn from it"
    elif mean >= signal or mean > LOUD_NATS:
        status = "failed" if mean >= signal else "warning"
    elif mean > LOUD_SHARE * signal:
        status = "warning"
    return Finding(
        check="replica noise",
        subject=f"pool {pool.name}",
        status=status,
        measured=f"scores of {len(s)} sampled tokens change by {mean:.2g} nats on average, {float(noise.max()):.2g} at "
        f"most, between alone and in a batch{f' and between {replicas} teachers' if replicas > 1 else ''}; student and "
        f"teacher differ by {signal:.2g} per token, reverse KL {kl:.2g}",
        normal=f"noise below {LOUD_SHARE:.0%} of that difference, and below {LOUD_NATS:g} nats",
        advice=advice,
        figures={"noise_nats": mean, "largest_noise_nats": float(noise.max()), "signal_nats": signal, "reverse_kl": kl},
    )


def limits(case: ModelCase, key: str) -> tuple[float, float]:
    """Mean distance from the reference, in nats, up to which an engine is fine, and above which it is wrong. `key`: of
    its group of workers."""
    return EXACT_NATS if engines.exact(case, key) else ROUNDED_NATS


def _status(apart: float, fine: float, bad: float) -> Status:
    return "ok" if apart <= fine else "warning" if apart <= bad else "failed"


def _apart(a: Floats, b: Floats) -> float:
    """Infinite for NaN."""
    apart = float(np.abs(a.astype(np.float64) - b).mean()) if len(a) else 0.0
    return apart if math.isfinite(apart) else math.inf
