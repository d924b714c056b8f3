"""Check that the actor's engine computes with the weights that it is sent.

The way is the run's own: publisher, control channel, transport, receiver and engine. Changed weights go out, the
student's own after them; each time the engine writes, and its log-probs are compared with our own forward pass under
the same weights.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from stillhouse.engines.base import Float32s, GenerationRequest, Int32s
from stillhouse.engines.provider import Student
from stillhouse.launch.checks.finding import Finding, Impossible
from stillhouse.launch.checks.model_files import check_weights
from stillhouse.launch.config.pools import engine_of
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.messages import Membership, Sampling, WeightPlan, WeightVersion
from stillhouse.tools.doctor import engines, reference
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.scoring import limits
from stillhouse.tools.doctor.written import answers, write
from stillhouse.weights.checkpoint_names import checkpoint_pieces
from stillhouse.weights.config import sent_dtype
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.receiver import WeightReceiver
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.server_checks import LearnerCanary

ACTOR: Final = "actor-0"
TOKENS: Final = 12
CHANGED: Final = WeightVersion(0, 1)
BACK: Final = WeightVersion(0, 2)
STRENGTH: Final = 0.4
"""Each weight is multiplied by a random factor from 1 - STRENGTH to 1 + STRENGTH."""
POLL_S: Final = 0.05


class Sent(NamedTuple):
    """What the engine did with one version."""

    ids: list[Int32s]
    """Prompt and answer."""
    logprobs: list[Float32s]
    """Log-probs of the answers' tokens."""
    seconds: float
    """From the publication until the engine had it."""


def weights_taken(case: ModelCase) -> Iterator[Finding]:
    """Send two versions."""
    config = case.checked.config
    if config.learner.frozen:
        raise Impossible("learner.frozen: no weights are sent in this run")
    members = engine_of(config, "actor").members(config.actor, config.weights, config.models.student)
    if members.kind == "adapters":
        raise Impossible("the servers are sent adapters, which each version's own canary checks during the run")
    prompts = list({len(one.prompt_ids): one.prompt_ids for one in answers(case)}.values())[:2]
    changed, back = case.once("sending weights", lambda: _sent(case, members, prompts))
    parameters = check_weights("", Path(config.models.student)).parameters

    def expected(sent: Sent, change: Callable[[Any], None]) -> list[reference.Float64s]:
        tables = reference.logprobs(config.models.student, parameters, sent.ids, change=change)
        return [table[0, -len(got) :] for table, got in zip(tables, sent.logprobs, strict=True)]

    try:
        new, old = _apart(changed, expected(changed, _change)), _apart(changed, expected(changed, _keep))
        again = _apart(back, expected(back, _keep))
    except reference.TooLarge as error:
        raise Impossible(str(error)) from error
    yield _judged(case, members, changed, new, old, again)


def _judged(case: ModelCase, members: GroupMembers, changed: Sent, new: float, old: float, again: float) -> Finding:
    fine, bad = limits(case, "actor")
    kind = "its server" if members.kind == "servers" else "the embedded engine"
    measured = (
        f"under changed weights {kind} is {new:.2g} nats from our own forward pass with them, and {old:.2g} from that "
        f"with the former ones; {again:.2g} after changing them back; a version took {changed.seconds:.2f} s"
    )
    if new > bad and old <= fine:
        measured += "; it goes on with the former weights"
    status = "failed" if max(new, again) > bad else "warning" if max(new, again) > fine or old <= bad else "ok"
    return Finding(
        check="weights taken",
        subject="actor",
        status=status,
        measured=measured,
        normal=f"at most {fine:g} nats from the weights that were sent, and far from the former ones",
        advice="the engine reports a version that it does not compute with, so every staleness would be wrong: see how "
        "it takes weights (docs/engines.md, docs/sglang.md), and keep weights.verify on for servers",
        figures={"new_nats": new, "former_nats": old, "back_nats": again, "version_s": changed.seconds},
    )


def _sent(case: ModelCase, members: GroupMembers, prompts: Sequence[Int32s]) -> tuple[Sent, Sent]:
    config = case.checked.config
    model = load_causal_lm(config.models.student, device="cpu", dtype="float32", attention="packed")
    own = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    if members.kind == "servers":
        members = replace(members, pieces=checkpoint_pieces(model, list(model.named_parameters())))
    with ExitStack() as stack:
        _, student = stack.enter_context(engines.student(case))
        receiver = WeightReceiver(student.weights, name=ACTOR)
        receiver.start()
        stack.callback(receiver.close)
        publisher = stack.enter_context(_publisher(case, model, members, receiver))
        publisher.membership(Membership((ACTOR,), ("doctor",)))
        _change(model)
        changed = _publish(student, publisher, receiver, CHANGED, model, prompts)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(own[name])
        back = _publish(student, publisher, receiver, BACK, model, prompts)
    return changed, back


def _publisher(case: ModelCase, model: Any, members: GroupMembers, receiver: WeightReceiver) -> Publisher:
    """As the learner makes it (learner.worker)."""
    config = case.checked.config.weights
    canary = None
    if members.kind == "servers" and members.check_by != "off":
        n_vocab = vocab_tokens(load_tokenizer(case.config.models.student).get_vocab())
        sent = sent_dtype(config.dtype, members.dtype)
        canary = LearnerCanary(model, vocab_tokens=n_vocab, bfloat16=False, sent=sent)

    def post_plan(plan: WeightPlan) -> None:
        receiver.handle_plan(plan)

    return Publisher(
        config,
        snapshot_dir=case.scratch / "snapshots",
        post_plan=post_plan,
        published=lambda version, seconds: None,
        expected_actors=1,
        members=members,
        canary=canary,
    )


def _publish(
    student: Student,
    publisher: Publisher,
    receiver: WeightReceiver,
    version: WeightVersion,
    model: Any,
    prompts: Sequence[Int32s],
) -> Sent:
    """Send the model's weights, wait until the engine has them, and let it write. Whoever examines has a deadline."""
    began_s = time.monotonic()
    publisher.publish(version, model.named_parameters())
    while student.engine.version < version:
        receiver.raise_if_failed()
        publisher.wait_idle(0.0)
        student.engine.poll(POLL_S)
        stats = publisher.stats
        if stats.dropped_total:
            raise RuntimeError(f"the engine was left out of the weight group: {dict(stats.dropped_total)}")
    seconds = time.monotonic() - began_s
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    requests = [GenerationRequest(f"{version}-{i}", ids, sampling, TOKENS, ()) for i, ids in enumerate(prompts)]
    written = write(student.engine, requests)
    ids = [np.concatenate([prompt, answer]) for prompt, (answer, _) in zip(prompts, written, strict=True)]
    return Sent(ids, [logprobs for _, logprobs in written], seconds)


def _change(model: Any) -> None:
    """The same factors for the same names, whoever calls."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            factor = 1 + STRENGTH * (2 * torch.rand(tensor.shape, generator=generator) - 1)
            tensor.mul_(factor.to(tensor))


def _keep(model: Any) -> None: ...


def _apart(sent: Sent, expected: Sequence[reference.Float64s]) -> float:
    apart = np.concatenate([abs(got - right) for got, right in zip(sent.logprobs, expected, strict=True)])
    return float(apart.mean()) if np.isfinite(apart).all() else float("inf")
