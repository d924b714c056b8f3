"""Divergences over the whole vocabulary from teachers' hidden states: an optimizer step, from payloads as they come off
the wire to the gradient of the parameters, against a plain model and dense distributions in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import BatchError, TrainItem, UnreadableScores, train_items
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.teacher_heads import HeadOf
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.logprobs import LmHead
from stillhouse.protocol.messages import TopKPiece
from stillhouse.protocol.payloads.hidden import encode_hidden
from tests.learner.settings import learner_config
from tests.learner.step.gradients import step_gradients
from tests.learner.step.test_top_k_step import edges_of, with_sets

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
VOCAB: Final = 20
"""Tokens; the tiny student has 23 rows, the teachers' heads 25 and 21."""
ROUTES = {"default": (), "math": ("math",), "style": ("style",)}
NAMES = ("reverse_kl", "forward_kl", "mixed", "jsd")


def head_of(pool: str, dtype: torch.dtype = torch.float64) -> LmHead:
    """Of different shapes; one has a bias, a scale and a softcap. Padding rows are likely, and must not count."""
    generator = torch.Generator().manual_seed(len(pool))
    rows, size = (25, 6) if pool == "math" else (21, 4)
    weight_VH = torch.randn(rows, size, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH[VOCAB:] *= 3.0
    if pool != "math":
        return LmHead(weight_VH)
    return LmHead(weight_VH, torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype), 0.7, 5.0)


def states_of(train_item: TrainItem, pool: str) -> Tensor:
    """[L, H] bfloat16: at token t the state that predicts it."""
    seed = sum(f"{pool} {train_item.item.rollout_id}".encode())
    size = head_of(pool).weight_VH.shape[1]
    return torch.randn(train_item.item.end, size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def dense_q(train_item: TrainItem, pool: str) -> Tensor:
    """[L, V] log-probs of the teacher in float64, written out."""
    head, states_LH = head_of(pool), states_of(train_item, pool).double()
    z_LV = states_LH @ head.weight_VH.T
    if head.bias_V is not None:
        z_LV = z_LV + head.bias_V
    z_LV = z_LV * head.scale
    if head.softcap is not None:
        z_LV = head.softcap * torch.tanh(z_LV / head.softcap)
    z_LV = z_LV[:, :VOCAB]
    return z_LV - z_LV.exp().sum(dim=1, keepdim=True).log()


def with_states(train_item: TrainItem, *, cut: int | None = None, shift: int = 0, head: int = 0) -> TrainItem:
    """As the buffer hands it on: a payload per teacher and segment (cut in two at `cut`), beside the log-probs of the
    sampled tokens. `shift`: the fault of sending the states of so many positions later."""
    edges = edges_of(train_item, cut)
    if not edges or not train_item.item.teachers:
        return train_item
    pieces: list[TopKPiece] = []
    payloads: list[bytes] = []
    for start, end in itertools.pairwise(edges):
        for m, pool in enumerate(train_item.item.teachers):
            states_TH = states_of(train_item, pool).roll(-shift, 0)[start:end]
            payloads.append(encode_hidden(states_TH.view(torch.int16).numpy().view(np.uint16), head))
            pieces.append(TopKPiece(m, start, end, len(payloads[-1])))
    ids_L1 = torch.from_numpy(train_item.tokens_L).long()[:, None]
    sent = [dense_q(train_item, pool).gather(1, ids_L1)[:, 0].float().numpy() for pool in train_item.item.teachers]
    frames: list[npt.NDArray[Any]] = [
        train_item.tokens_L,
        train_item.behaviour_L,
        train_item.train_mask_L.astype(np.uint8),
        np.stack(sent),
        np.frombuffer(b"".join(payloads), np.uint8),
    ]
    return train_items([msgspec.structs.replace(train_item.item, top_k=tuple(pieces))], frames)[0]


def items_with_states(make_item: Make) -> list[TrainItem]:
    made = [
        make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB),
        make_item("b", [0, 1, 1, 0, 0, 1, 0], teachers=("math", "style"), vocab=VOCAB),
        make_item("c", [0, 0, 0], vocab=VOCAB),
        make_item("d", [0] * 6 + [1] * 9, teachers=("style",), vocab=VOCAB),
        make_item("e", [0, 1, 1], teachers=(), vocab=VOCAB),
    ]
    return [with_states(train_item, cut=3) for train_item in made]


def config_of(**fields: Any) -> LearnerConfig:
    plain: dict[str, Any] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}
    return learner_config(tasks=TaskConfig(routes=ROUTES), **{**plain, **fields})


def trainer_of(model: PreTrainedModel, config: LearnerConfig, heads: HeadOf = head_of) -> Trainer:
    return Trainer(model, config, total_steps=10, vocab_tokens=VOCAB, head_of=heads)


def always(head: LmHead) -> HeadOf:
    return {"math": head}.__getitem__


def dense_divergence(name: str, p_V: Tensor, q_V: Tensor, temperature: float = 1.0) -> Tensor:
    """From the definitions, with the members' default options."""
    p_V, q_V = (one_V ** (1 / temperature) for one_V in (p_V, q_V))
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    reverse, forward = (p_V * (p_V / q_V).log()).sum(), (q_V * (q_V / p_V).log()).sum()
    m_V = (p_V + q_V) / 2
    jsd = ((p_V * (p_V / m_V).log()).sum() + (q_V * (q_V / m_V).log()).sum()) / 2
    return {"reverse_kl": reverse, "forward_kl": forward, "mixed": (reverse + forward) / 2, "jsd": jsd}[name]


def slow(
    model: PreTrainedModel, items: Sequence[TrainItem], name: str, coefs: dict[str, float], temperature: float = 1.0
) -> tuple[dict[str, Tensor], float]:
    """Gradients and mean divergence: token by token, teacher by teacher, over the whole vocabulary."""
    n_tokens = sum(train_item.n_trained for train_item in items)
    loss, told = torch.zeros((), dtype=torch.float64), list[float]()
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        p_LV = torch.softmax(model(input_ids=ids_L[None]).logits[0][:, :VOCAB], dim=1)
        for t in np.flatnonzero(train_item.train_mask_L).tolist():
            total = 0.0
            for pool in train_item.item.teachers:
                d = dense_divergence(name, p_LV[t - 1], dense_q(train_item, pool)[t].exp(), temperature)
                loss, total = loss + coefs.get(pool, 1.0) * d / n_tokens, total + d.item()
            if train_item.item.teachers:
                told.append(total)
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(np.mean(told))


@pytest.mark.parametrize(("pack_tokens", "temperature"), [(1, 1.0), (16, 1.0), (16, 1.7)])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_dense_distributions(
    tiny_student: Student, make_item: Make, name: str, pack_tokens: int, temperature: float
) -> None:
    items = items_with_states(make_item)
    config = config_of(
        divergence=(name, {"temperature": temperature}),
        teacher_coefs={"math": 0.3},
        pack_tokens=pack_tokens,
        logprob_chunk_tokens=4,
        importance="none",
    )
    expected, divergence = slow(tiny_student("eager", torch.float64), items, name, {"math": 0.3}, temperature)
    got = step_gradients(trainer_of(tiny_student(dtype=torch.float64), config), items)
    assert got.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(got[parameter], gradient, atol=1e-6, rtol=1e-5, msg=parameter)
    metrics = trainer_of(tiny_student(dtype=torch.float64), config).step(items)
    assert metrics.divergence == pytest.approx(divergence, rel=1e-6)
    assert metrics.hidden_error is not None and metrics.hidden_error < 1e-6


def test_one_teacher_may_send_states_and_another_top_k_sets(tiny_student: Student, make_item: Make) -> None:
    """In one batch; the gradient is the sum of what each has alone, by tokens."""
    one = with_states(make_item("a", [0, 1, 1, 1], teachers=("math",), vocab=VOCAB))
    other = with_sets(make_item("b", [0, 1, 1], teachers=("style",), vocab=VOCAB))

    def gradients(*items: TrainItem) -> dict[str, Tensor]:
        trainer = trainer_of(tiny_student(dtype=torch.float64), config_of(divergence="jsd"))
        return step_gradients(trainer, list(items))

    both, first, second = gradients(one, other), gradients(one), gradients(other)
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, first[name] * 3 / 5 + second[name] * 2 / 5, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_of_the_next_position_end_the_step(tiny_student: Student, make_item: Make, shift: int) -> None:
    good = make_item("a", [0, 0, 0] + [1] * 12, teachers=("math",), vocab=VOCAB)
    trainer = trainer_of(tiny_student(), config_of(divergence="reverse_kl"))
    trainer.step([with_states(good)])
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(BatchError, match=r"nats on average.*models\.teacher"):
        trainer.step([with_states(good, shift=shift)])
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))
    assert trainer.steps_done == 1


def test_the_head_of_another_model_ends_the_step(tiny_student: Student, make_item: Make) -> None:
    item = with_states(make_item("a", [0] + [1] * 12, teachers=("math",), vocab=VOCAB))
    config = config_of(divergence="reverse_kl")
    right = head_of("math")
    same_size = replace(right, weight_VH=right.weight_VH.roll(1, 0))
    with pytest.raises(BatchError, match="the learner must read the output head of the model"):
        trainer_of(tiny_student(), config, always(same_size)).step([item])
    for other, got in ((head_of("style"), "21 rows of 4"), (replace(right, weight_VH=right.weight_VH[:19]), "19 rows")):
        with pytest.raises(ValueError, match=f"hidden states of 6 numbers for an output head of {got}"):
            trainer_of(tiny_student(), config, always(other)).step([item])
    with pytest.raises(ValueError, match="has no teacher's output head"):
        Trainer(tiny_student(), config, total_steps=3, vocab_tokens=VOCAB).step([item])


def test_states_of_another_head_are_refused_by_its_name(tiny_student: Student, make_item: Make) -> None:
    """A difference that the numbers would not show."""
    item, right = make_item("a", [0] + [1] * 12, teachers=("math",), vocab=VOCAB), head_of("math")
    trainer = trainer_of(tiny_student(), config_of(divergence="reverse_kl"), always(right))
    trainer.step([with_states(item, head=right.identity)])
    other = replace(right, weight_VH=right.weight_VH * 1.01).identity
    with pytest.raises(
        ValueError, match=f"belong to the output head {other:016x}, the learner has {right.identity:016x}"
    ):
        trainer.step([with_states(item, head=other)])


def test_a_head_that_is_a_little_off_for_one_tag_ends_the_step(tiny_student: Student, make_item: Make) -> None:
    """The mean over all tags is below the bound; what is above it is the one teacher's, at one tag's tokens."""
    good = [with_states(make_item(f"a{i}", [0] + [1] * 20, teachers=("math",), vocab=VOCAB)) for i in range(9)]
    other = with_states(make_item("b", [0] + [1] * 12, teachers=("style",), vocab=VOCAB))
    other = replace(other, item=msgspec.structs.replace(other.item, tag="rare"))
    heads = {"math": head_of("math"), "style": replace(head_of("style"), scale=0.85)}
    trainer = trainer_of(tiny_student(), config_of(divergence="reverse_kl"), heads.__getitem__)
    with pytest.raises(BatchError, match=r"teacher 'style', tag 'rare'\) differ by 0\.\d+ nats"):
        trainer.step([*good, other])
    error = trainer.step(good).hidden_error
    assert error is not None and error < 1e-3


def _bytes(train_item: TrainItem, change: Callable[[bytearray], bytearray]) -> TrainItem:
    body = change(bytearray(train_item.payloads.tobytes()))
    pieces = (msgspec.structs.replace(train_item.item.top_k[0], n_bytes=len(body)),)
    item = msgspec.structs.replace(train_item.item, top_k=pieces)
    return replace(train_item, item=item, payloads=np.frombuffer(bytes(body), np.uint8))


def _with_infinity(body: bytearray) -> bytearray:
    body[-2:] = b"\x80\x7f"
    return body


def _other_range(train_item: TrainItem) -> TrainItem:
    pieces = (msgspec.structs.replace(train_item.item.top_k[0], end=3),)
    return replace(train_item, item=msgspec.structs.replace(train_item.item, top_k=pieces))


SPOILT: dict[str, tuple[Callable[[TrainItem], TrainItem], str]] = {
    "cut": (lambda t: _bytes(t, lambda b: b[:-1]), "hidden-state payload: got 43 bytes"),
    "not finite": (
        lambda t: _bytes(t, _with_infinity),
        "hidden-state payload: got infinity or NaN in the state of token 2",
    ),
    "range": (_other_range, "hidden states of 3 tokens, expected 2"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT)
def test_a_rollout_whose_states_cannot_be_read_is_left_out_by_name(
    tiny_student: Student, make_item: Make, spoil: Callable[[TrainItem], TrainItem], message: str
) -> None:
    bad, good = (with_states(make_item(name, [0, 1, 1, 1], vocab=VOCAB)) for name in ("bad", "good"))
    trainer = trainer_of(tiny_student(), config_of(divergence="jsd"))
    with pytest.raises(UnreadableScores, match=f"rollout 'bad': teacher 'default': {message}"):
        trainer.step([spoil(bad), good])
    outcome = finite_step(trainer, [spoil(bad), good])
    assert outcome.masked == ("bad",) and outcome.figures is not None and outcome.figures.tokens == 3


def test_states_of_two_sizes_from_one_teacher_are_refused(tiny_student: Student, make_item: Make) -> None:
    one = with_states(make_item("a", [0, 1, 1], vocab=VOCAB))
    other = with_states(make_item("b", [0, 1, 1], teachers=("math",), vocab=VOCAB))
    other = replace(other, item=msgspec.structs.replace(other.item, teachers=("default",)))
    for pair, message in (([one, other], r"numbers; expected one size"), ([one, with_sets(other)], "one of them")):
        with pytest.raises(ValueError, match=message):
            trainer_of(tiny_student(), config_of(divergence="jsd")).step(pair)
