"""What a server has to prove, against one that only pretends: its answers are written down here."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from stillhouse.engines.http.link import RequestRefused
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.engines.sglang.weights import SGLangVerifier
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.checks import Canary
from stillhouse.weights.control_messages import WeightCheck
from stillhouse.weights.errors import SnapshotRefused, WeightsDiffer, WeightsRefused

V1: Final = WeightVersion(0, 1)
IDS: Final = (3, 1, 4, 1, 5)
FILE: Final = WeightsRef(V1, "/weights/0.1/model.safetensors", "sha")


class Pretender:
    """A server, and the engine that talks to it. Its model is one number: the log-prob of every token."""

    url = "http://pretender"

    def __init__(self, weight: float = -1.0) -> None:
        self.server = self
        self.features = SimpleNamespace(precision="float32")
        self.vocab_size = 10
        self.weight = weight
        self.checksums: dict[str, str] | None = {"a": "1"}
        self.asked: list[str] = []

    def ask(self, path: str, body: dict[str, Any]) -> bytes:
        self.asked.append(path)
        if path == "/generate":
            assert body["return_logprob"] and body["logprob_start_len"] == 0 and tuple(body["input_ids"]) == IDS
            entries = [[None if i == 0 else self.weight, token, None] for i, token in enumerate(IDS)]
            return json.dumps({"meta_info": {"input_token_logprobs": entries}}).encode()
        if self.checksums is None:
            raise RequestRefused("HTTP 400: needs CUDA")
        return json.dumps({"ranks": [{"checksums": self.checksums}]}).encode()


def sings(weight: float) -> Canary:
    return Canary(token_ids=IDS, logprobs=(weight,) * (len(IDS) - 1), exact=True)


def nothing_new(ref: WeightsRef) -> None:
    """The file has what the server has."""


def unreadable(ref: WeightsRef) -> None:
    raise SnapshotRefused(f"{ref.path}: no such file")


def verifier(server: Pretender) -> SGLangVerifier:
    return SGLangVerifier(cast(SGLangEngine, server))


def test_a_version_is_good_when_checksums_and_canary_are() -> None:
    server = Pretender()
    verify = verifier(server)
    verify.check(WeightCheck(weights=FILE, canary=sings(-1.0)), V1, server.ask, nothing_new)
    assert verify.stats == {
        "weight_checks_total": 1.0,
        "weight_canaries_total": 1.0,
        "weight_checks_skipped_total": 0.0,
    }
    assert server.asked == ["/weights_checker", "/weights_checker", "/generate"]


def test_weights_that_never_arrive_are_found_though_every_update_succeeds() -> None:
    server = Pretender(-1.0)
    verify = verifier(server)
    verify.check(WeightCheck(canary=sings(-1.0)), V1, server.ask, nothing_new)
    with pytest.raises(WeightsDiffer, match=r"version 0\.1: .* canary prompt"):
        verify.check(WeightCheck(canary=sings(-1.1)), V1, server.ask, nothing_new)
    with pytest.raises(WeightsDiffer, match="canary prompt"):
        verify.check_canary(sings(-1.1), V1, server.ask)


@pytest.mark.parametrize("lacks", ["checksums", "file"])
def test_where_checksums_cannot_be_had_the_canary_is_enough_unless_they_were_asked_for(lacks: str) -> None:
    server = Pretender()
    if lacks == "checksums":
        server.checksums = None
    reload = unreadable if lacks == "file" else nothing_new
    verify = verifier(server)
    with pytest.raises(WeightsRefused, match="cannot be compared"):
        verify.check(WeightCheck(FILE), V1, server.ask, reload)
    verify.check(WeightCheck(FILE, canary=sings(-1.0)), V1, server.ask, reload)
    assert verify.stats["weight_checks_skipped_total"] == verify.stats["weight_canaries_total"] == 1
    with pytest.raises(WeightsRefused, match="cannot be compared"):
        verify.check(WeightCheck(FILE, required=True, canary=sings(-1.0)), V1, server.ask, reload)


def test_taken_from_the_file_the_version_must_have_the_same_checksums() -> None:
    server = Pretender()

    def other(ref: WeightsRef) -> None:
        server.checksums = {"a": "2"}

    verifier(server).check(WeightCheck(weights=FILE), V1, server.ask, nothing_new)
    with pytest.raises(WeightsDiffer, match=r"1 tensors differ .*\['a'\]"):
        verifier(server).check(WeightCheck(weights=FILE), V1, server.ask, other)
