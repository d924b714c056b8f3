"""Which arms there are, and the rules by which a claim is held. Both were committed before the arms were run.

Every method gets the same grid of learning rates with seed 0; the rate with the better sampled accuracy at the end is
that of the row, for all seeds. Controls have that of on-policy reverse KL.

Changed once, when the GRPO arms of seed 0 and six arms of claim 2 had been run: claims 2, 3, 4 and 6 began at the weak
student, from which no row came above 0.08 with 12 steps (docs/results/claims.md shows these arms). They begin at S now,
with 10 steps. And rates are chosen with seed 0 alone.

Added when all arms of claims 1, 2, 3, 4 and 6 were known, their own rules before their own arms: 2b, 3b and 5; then 2c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bench.claims.arm import Arm, Method, Phase

RATES: Final = (5e-4, 2e-3)
SEEDS: Final = (0, 1, 2)
GRPO_STEPS, GRPO_BATCH, GROUP = 40, 64, 8
DENSE_STEPS: Final = 12
BASE_STEPS: Final = 10
"""Steps on the student's own text, 32 rollouts each: "1x"."""
TIMES: Final = (1, 2, 5, 10)
TEXTS: Final = 3_840
"""Number of texts that the teacher writes once, for all arms; each seed begins at another place. 10x takes 3,200."""
OPD, STALE = "OPD, reverse KL", "OPD, reverse KL, 4 steps stale"
LONGER: Final = f"OPD, reverse KL, {GRPO_STEPS} steps"
REUSED: Final = (1, 16, 200)
DOCUMENT_STEPS, DOCUMENT_LR = 60, 4e-3
RECOVERY_STEPS: Final = 16

RULES: Final = {
    "1": (
        "Dense against sparse",
        "GRPO trains the start S to R (40 steps of 8 x 8 rollouts). Then R is distilled into S (12 steps of 64 "
        "rollouts). The target is 0.95 times R's sampled accuracy at the end, per seed; a method's steps are "
        "those of its first evaluation at or above it (every 2 steps for distillation, every 5 for GRPO; no "
        "interpolation). **Held** if the median over seeds of GRPO's steps divided by those of reverse KL is at "
        "least 7. **Partly** if it is at least 2. Else, or if a seed of distillation never gets there, **not "
        "held**. If R is not at least 0.1 above S, GRPO did not learn, and the claim is **not tested**. GRPO's "
        "later evaluations are noisy, so its first passing of the target favours GRPO.",
    ),
    "2": (
        "On-policy against more off-policy text",
        "From S: 10 steps of 32 rollouts (1x) by distillation on its own text, against SFT on 1, 2, 5 and 10 "
        "times as much text of the teacher, each text once, each length with its own decay. **Held** if the least "
        "SFT that has the mean sampled accuracy of reverse KL costs at least 9 times its FLOPs (teacher's writing "
        "included), or if none up to 10x has it. **Partly** from 1.5 times on. Else **not held**. The same is "
        "said for forward KL, for greedy accuracy, and without the FLOPs of the teacher's writing, beside it.",
    ),
    "2b": (
        "On-policy, with the FLOPs of more text",
        "Added after claim 2 was seen, to explain it: reverse KL on the student's own text with 2, 5 and 10 times the "
        "steps, and so as many texts as SFT has, at the same rates and with the same decay. The curve is the mean "
        "sampled accuracy of SFT, 1x to 10x, against the logarithm of all FLOPs, straight between two rows, and level "
        "behind the last. Each row of reverse KL is compared with the curve at its own FLOPs, and is above or below "
        "it if the difference is more than the standard errors of both together (of the curve: that of the next row "
        "of SFT). **Held** (on-policy is worth its FLOPs) if all three rows are above; **partly** if one or two are, "
        "and none is below; else **not held**. A row of 10x has more FLOPs than the curve has; that is in its favour.",
    ),
    "2c": (
        "On-policy against more off-policy text, longer answers",
        "The comparisons of 2 and 2b on tallies of 28 to 42 digits (answers of 202 to 300 tokens), with a teacher and "
        "a start of their own, at the rates that 2 and 2b chose, so that none is chosen here: reverse KL, 1x and 5x, "
        "against SFT, 1x, 2x, 5x and 10x. The curve is that of 2b, through these rows of SFT. **Held** if the least "
        "SFT that has the mean sampled accuracy of reverse KL, 1x, costs at least 9 times its FLOPs, or none up to 10x "
        "has it, and both rows of reverse KL are above the curve. **Partly** if one at least is above it, and none "
        "below. Else **not held**. If SFT, 10x, is not at least 0.1 above the start, the claim is **not tested**.",
    ),
    "3": (
        "Order",
        "At about equal FLOPs (10 steps of 32 texts) from S: SFT, off-policy KD (forward and reverse KL on the "
        "teacher's text), on-policy reverse KL, and 5 steps of SFT followed by 5 on-policy. **Held** if SFT + OPD "
        "has the best mean sampled accuracy, by more than the standard error of the difference to the next; "
        "**partly** if it is best by less, or second to OPD alone; else **not held**.",
    ),
    "3b": (
        "A bigger gap for a smaller student",
        "The rows of claim 3 with a student of half the width (32), which has its own start, stopped at the first "
        "look of 0.35 or more too. The gap is the mean sampled accuracy of SFT + OPD minus that of SFT, and its error "
        "both standard errors together. **Held** if the smaller student's gap is above 0 and above the larger one's, "
        "each by more than the error. **Partly** if it is above both by less. Else **not held**.",
    ),
    "4": (
        "Data reuse",
        "10 steps of 32 rollouts from S on 1, 16, 200 or always new prompts, by on-policy reverse KL; beside it "
        "SFT on as many texts of the teacher, and GRPO (40 steps) on as many prompts. Gain: sampled accuracy at "
        "the end minus at the start. **Held** if OPD on one prompt has at least 0.8 of the gain of new prompts "
        "while GRPO on one prompt has less than 0.5 of its own. **Partly** if this is so for 16 prompts but not "
        "for one. Else **not held**.",
    ),
    "5": (
        "Recovery",
        f"The teacher of the pair, which knows the tally, is trained on documents ({DOCUMENT_STEPS} steps of 32): "
        "running text of 32 made-up facts, other ones for each seed. Two texts of each 32 are the teacher's own on "
        "the tally, because documents alone left nothing of the skill to go on from (a trial with another seed). Then "
        f"its earlier self is its teacher on prompts of the tally ({RECOVERY_STEPS} steps of 32 rollouts, reverse KL). "
        f"Beside it SFT on what the earlier self writes to such prompts, {RECOVERY_STEPS * 5 // 4} steps, which are as "
        "many FLOPs; and nothing. Skill: sampled accuracy on the tally. Knowledge: sampled accuracy on the documents' "
        "facts, asked as running text. "
        "A method's rate is that with the better sum of both. The claim is **not tested** if the documents leave "
        "more than half of the skill, or give less than 0.5 of the knowledge. The skill returns if its mean is at "
        "least 0.9 of that before the documents; the knowledge stays if its mean is at least 0.9 of that behind "
        "them. **Held** if on-policy both are so, and with SFT not both. **Partly** if both are so with SFT, too. "
        "Else **not held**.",
    ),
    "6": (
        "Lambda and beta",
        "10 steps of 32 texts from S, a share lambda of 0, 0.25, 0.5 or 1 written by the student, with forward KL "
        "(beta 0), JSD (beta 0.5) or reverse KL (beta 1). **Held** (GKD: more on-policy is better) if for each "
        "beta the mean sampled accuracy at lambda 1 is above that at lambda 0 by more than its standard error; "
        "**partly** if for some; else **not held**.",
    ),
}


def grid() -> list[Arm]:
    """In the order in which they are made."""
    arms = [arm for seed in SEEDS for arm in dense(seed)]
    for claim in (off_policy_and_order, further, controls, reuse, shares, longer, smaller, recovery, long_answers):
        arms += [arm for seed in SEEDS for arm in claim(seed)]
    return arms


def at_rates(arm: Arm, rates: Sequence[float] = RATES) -> list[Arm]:
    """Seed 0 at each rate; other seeds at that which was better with seed 0."""
    first = [replace(arm, seed=0, phases=tuple(replace(one, lr=rate) for one in arm.phases)) for rate in rates]
    return [replace(arm, rate_of=tuple(one.name for one in first))] if arm.seed else first


def dense(seed: int) -> list[Arm]:
    rows: tuple[tuple[str, Method], ...] = ((OPD, "reverse_kl"), ("OPD, k1", "k1"))
    distilled = (arm for row, method in rows for arm in at_rates(_of_r(row, seed, _dense(method))))
    return [*_grpo("1", "GRPO", seed, keeps=True), *distilled]


def further(seed: int) -> list[Arm]:
    """To explain claim 1, with no part in its verdict: as many steps as GRPO has."""
    phase = replace(_dense("reverse_kl"), steps=GRPO_STEPS, eval_every=5)
    return [_like_opd(_of_r(LONGER, seed, phase))]


def controls(seed: int) -> list[Arm]:
    """Stale weights, and no teacher."""
    arms = [
        _of_r(STALE, seed, replace(_dense("reverse_kl"), staleness=4)),
        replace(_of_r("null teacher", seed, _dense("null")), teacher=()),
        _row("2", STALE, seed, replace(_base("reverse_kl"), staleness=4)),
        _row("2", "null teacher", seed, _base("null")),
    ]
    return [_like_opd(arm) for arm in arms]


def _like_opd(arm: Arm) -> Arm:
    """At the rate of the claim's on-policy reverse KL."""
    own = at_rates(Arm(arm.claim, OPD, 0, (_dense("reverse_kl"),)))
    return replace(arm, rate_of=tuple(one.name for one in own))


def _dense(method: Method) -> Phase:
    return Phase(method, DENSE_STEPS, 0.0, GRPO_BATCH, constant=True, eval_every=2)


def _of_r(row: str, seed: int, phase: Phase) -> Arm:
    """R is what GRPO made with this seed, of seed 0 the better one."""
    return Arm("1", row, seed, (phase,), teacher=tuple(arm.name for arm in _grpo("1", "GRPO", seed)))


def _grpo(claim: str, row: str, seed: int, *, prompts: int = 0, keeps: bool = False) -> list[Arm]:
    phase = Phase("grpo", GRPO_STEPS, 0.0, GRPO_BATCH, group_size=GROUP, prompts=prompts, constant=True, eval_every=5)
    return at_rates(Arm(claim, row, seed, (phase,), teacher=(), keeps=keeps))


def _row(claim: str, row: str, seed: int, *phases: Phase) -> Arm:
    graded = any(phase.method not in ("seq_kd", "null") for phase in phases)
    return Arm(claim, row, seed, phases, teacher=("teacher",) if graded else ())


def _base(method: Method, own: float = 1.0, *, steps: int = BASE_STEPS, prompts: int = 0) -> Phase:
    """1x: BASE_STEPS of 32."""
    return Phase(method, steps, 0.0, own=own, prompts=prompts)


def off_policy_and_order(seed: int) -> list[Arm]:
    arms = [
        _row("2", OPD, seed, replace(_base("reverse_kl"), eval_every=5)),
        _row("2", "OPD, forward KL", seed, replace(_base("forward_kl"), eval_every=5)),
        *(_row("2", f"SFT, {n}x", seed, _base("seq_kd", 0.0, steps=BASE_STEPS * n)) for n in TIMES),
        *_order("3", seed),
    ]
    return [one for arm in arms for one in at_rates(arm)]


def _order(claim: str, seed: int) -> list[Arm]:
    """The rows of claim 3 that claim 2 does not have."""
    half = BASE_STEPS // 2
    return [
        _row(claim, "off-policy KD, forward KL", seed, _base("forward_kl", 0.0)),
        _row(claim, "off-policy KD, reverse KL", seed, _base("reverse_kl", 0.0)),
        _row(claim, "SFT, then OPD", seed, _base("seq_kd", 0.0, steps=half), _base("reverse_kl", steps=half)),
    ]


def longer(seed: int) -> list[Arm]:
    arms = [_row("2b", f"{OPD}, {n}x", seed, _base("reverse_kl", steps=BASE_STEPS * n)) for n in TIMES[1:]]
    return [one for arm in arms for one in at_rates(arm)]


def long_answers(seed: int) -> list[Arm]:
    rows: tuple[tuple[str, Method, int, float], ...] = (
        *((OPD, "reverse_kl", n, lr) for n, lr in ((1, 5e-4), (5, 2e-3))),
        *(("SFT", "seq_kd", n, lr) for n, lr in zip(TIMES, (5e-4, 2e-3, 2e-3, 2e-3), strict=True)),
    )
    arms = [_row("2c", f"{w}, {n}x", seed, Phase(m, BASE_STEPS * n, lr, own=float(w == OPD))) for w, m, n, lr in rows]
    return [replace(arm, start="long-start", teacher=("long-teacher",) if arm.teacher else ()) for arm in arms]


def smaller(seed: int) -> list[Arm]:
    rows = [_row("3b", "SFT", seed, _base("seq_kd", 0.0)), _row("3b", OPD, seed, _base("reverse_kl"))]
    arms = [replace(arm, start="small") for arm in (*rows, *_order("3b", seed))]
    return [one for arm in arms for one in at_rates(arm)]


def reuse(seed: int) -> list[Arm]:
    arms: list[Arm] = []
    for prompts in REUSED:
        arms += at_rates(_row("4", f"OPD, {prompts}", seed, _base("reverse_kl", prompts=prompts)))
        arms += at_rates(_row("4", f"SFT, {prompts}", seed, _base("seq_kd", 0.0, prompts=prompts)))
        arms += _grpo("4", f"GRPO, {prompts}", seed, prompts=prompts)
    return arms


def shares(seed: int) -> list[Arm]:
    """Those that are not rows of other claims."""
    methods: tuple[tuple[str, Method], ...] = (
        ("forward KL", "forward_kl"),
        ("JSD", "jsd"),
        ("reverse KL", "reverse_kl"),
    )
    arms = [_row("6", f"JSD, {own:g}", seed, _base("jsd", own)) for own in (0.0, 1.0)]
    arms += [_row("6", f"{word}, {own:g}", seed, _base(method, own)) for word, method in methods for own in (0.25, 0.5)]
    return [one for arm in arms for one in at_rates(arm)]


def recovery(seed: int) -> list[Arm]:
    """Documents at one rate; what follows at the rates of all."""
    read = Phase("seq_kd", DOCUMENT_STEPS, DOCUMENT_LR, own=0.0, documents=15 / 16)
    told = Arm("5", "documents", seed, (read,), start="teacher", teacher=(), keeps=True, asks_facts=True)
    rows = (
        ("OPD, reverse KL", _base("reverse_kl", steps=RECOVERY_STEPS)),
        ("SFT", _base("seq_kd", 0.0, steps=RECOVERY_STEPS * 5 // 4)),
    )
    arms = [
        replace(_row("5", row, seed, replace(phase, eval_every=phase.steps // 2)), start=told.name, asks_facts=True)
        for row, phase in rows
    ]
    return [told, *(one for arm in arms for one in at_rates(arm))]
