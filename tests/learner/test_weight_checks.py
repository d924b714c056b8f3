"""When servers prove that they have a version, and what they must say."""

from __future__ import annotations

import hashlib

import torch

from learner.members import Members
from learner.roster import Seat
from learner.weight_checks import CheckSchedule, expected_checksums

A, B = Seat("actor-0", "1"), Seat("actor-1", "1")
SERVERS = Members(kind="servers", check_by="expected")


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())).digest()[:8].hex()


def test_the_first_version_of_each_seat_is_checked() -> None:
    schedule = CheckSchedule(SERVERS, 0)
    assert schedule.due([A]) == "expected"
    schedule.sent([A], checked=True)
    assert schedule.due([A]) == "off"
    assert schedule.due([A, B]) == "expected"
    schedule.sent([A, B], checked=True)
    assert schedule.due([A, B]) == schedule.due([B]) == "off"
    assert schedule.due([Seat("actor-0", "2"), B]) == "expected"


def test_and_then_every_so_many() -> None:
    schedule = CheckSchedule(SERVERS, 3)
    due: list[str] = []
    for _ in range(7):
        by = schedule.due([A])
        due.append(by)
        schedule.sent([A], checked=by != "off")
    assert due == ["expected", "off", "expected", "off", "off", "expected", "off"]


def test_engines_are_never_asked() -> None:
    assert CheckSchedule(Members(), 1).due([A]) == "off"


def test_fused_tensors_have_the_rows_of_their_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {
        f"model.layers.0.{name}.weight": torch.randn(n, 4, generator=generator)
        for name, n in (
            ("self_attn.q_proj", 4),
            ("self_attn.k_proj", 2),
            ("self_attn.v_proj", 2),
            ("mlp.gate_proj", 6),
            ("mlp.up_proj", 6),
            ("self_attn.q_norm", 1),
        )
    }
    expected = expected_checksums(list(parts.items()))
    q, k, v, gate, up, norm = parts.values()
    assert expected["model.layers.0.self_attn.qkv_proj.weight"][0] == sha(torch.cat([q, k, v]))
    assert expected["model.layers.0.mlp.gate_up_proj.weight"][0] == sha(torch.cat([gate, up]))
    assert expected["model.layers.0.self_attn.q_norm.weight"][0] == sha(norm)
    assert len(expected) == len(parts) + 2


def test_a_server_may_hold_what_it_was_sent_in_another_dtype() -> None:
    tensor = torch.randn(3, 4)
    assert set(expected_checksums([("a", tensor)])["a"]) == {sha(tensor), sha(tensor.bfloat16()), sha(tensor.half())}
    assert expected_checksums([("n", torch.tensor([1, 2]))])["n"] == (sha(torch.tensor([1, 2])),)
