"""What servers take of GPUs that they share, by SGLang's own formula, and in which order they start there."""

from __future__ import annotations

from typing import Any

import pytest

from stillhouse.engines.provider import GpuRoom, ModelShape
from stillhouse.engines.sglang.servers import SGLangServers, default_fraction
from stillhouse.launch.checks.server_memory import GIB, Sized, size_servers
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.gpus import Places
from tests.launch.checks.test_memory import QWEN3_8B

TOKEN_BYTES = 36 * 2 * 1024 * 2
"""Of the 8B model's keys and values."""
WEIGHTS_GIB = 2 * QWEN3_8B.parameters / GIB


def served(actor: tuple[str, ...] = (), teacher: tuple[str, ...] = (), **plain: Any) -> RunConfig:
    def of(args: tuple[str, ...]) -> dict[str, Any]:
        return {"engine": "sglang", "server": {"device": "cuda", "args": list(args)}}

    return build(RunConfig, {"actors": 1, "actor": of(actor), "teacher": of(teacher), **plain})


def sized(config: RunConfig, gib: float = 80.0, learner: float = 20.0, shape: ModelShape | None = QWEN3_8B) -> Sized:
    places = Places({"learner": 0}, {"actor": ((0,),), "teacher": ((0,),)})
    return size_servers(config, places, (gib,), {0: learner * GIB}, lambda _: shape)


def test_in_turns_each_server_has_what_the_others_leave_there() -> None:
    """By hand: of 80 GiB the learner's 2 stay, and of the other server its process and CUDA graphs."""
    found = sized(served(launch={"share": "turns"}), learner=2.0)
    for need, other in zip(found.needs, reversed(found.needs), strict=True):
        stays = 2.0 + 1.0 + other.need.likely["CUDA graphs"] / GIB
        own = (need.total - need.need.likely["KV cache"]) / GIB
        assert need.need.likely["KV cache"] / GIB == pytest.approx(80.0 * 0.95 - stays - own)
        tokens = int(found.arguments[need.worker][3])
        assert tokens == int(need.need.likely["KV cache"] / TOKEN_BYTES)
    assert sum(n.total for n in found.needs) > 80 * GIB, "together they would not fit"


def cache_gib(found: Sized) -> dict[str, float]:
    return {need.worker: need.need.likely["KV cache"] / GIB for need in found.needs}


@pytest.mark.parametrize(
    ("args", "free", "gib"),
    [
        ((), 80.0, 80.0 * default_fraction(80 * GIB, 1) - WEIGHTS_GIB),
        (("--mem-fraction-static=0.5",), 80.0, 40.0 - WEIGHTS_GIB),
        (("--mem-fraction-static", "0.5"), 40.0, 20.0 - WEIGHTS_GIB),  # of what is free at its start
        (("--mem-fraction-static", "0.1"), 80.0, 0.0),  # SGLang: "Loaded weights leave no GPU memory"
        (("--max-total-tokens", "65536"), 80.0, 65536 * TOKEN_BYTES / GIB),
        (("--max-total-tokens=64Ki", "--kv-cache-dtype=fp8_e5m2"), 80.0, 65536 * TOKEN_BYTES / 2 / GIB),
        (("--max-total-tokens=10M",), 80.0, 80.0 * default_fraction(80 * GIB, 1) - WEIGHTS_GIB),
    ],
)
def test_a_cache_is_a_fraction_of_what_is_free_less_weights_and_at_most_the_tokens(
    args: tuple[str, ...], free: float, gib: float
) -> None:
    server = served(args).actor.server
    need = SGLangServers().memory("actor", server, QWEN3_8B, GpuRoom(80 * GIB, free * GIB))
    assert need.sure["weights"] / GIB == pytest.approx(WEIGHTS_GIB)
    assert need.likely["KV cache"] / GIB == pytest.approx(gib, abs=1e-6)


@pytest.mark.parametrize(
    ("args", "quantized_gib", "gib"),
    [
        (("--quantization", "fp8"), 0.0, 8.79),  # 6.95e9 numbers of layers in one byte, 1.24e9 in two
        (("--quantization=bitsandbytes",), 0.0, 5.96),
        (("--quantization", "awq"), 5.7, 5.7),  # the files say it
        ((), 5.7, 5.7),
    ],
)
def test_weights_in_fewer_bits_take_less(args: tuple[str, ...], quantized_gib: float, gib: float) -> None:
    shape = QWEN3_8B._replace(quantized_bytes=quantized_gib * GIB)
    need = SGLangServers().memory("teacher", served(teacher=args).teacher.server, shape, GpuRoom(80 * GIB, 80 * GIB))
    assert need.sure["weights"] / GIB == pytest.approx(gib, abs=0.01)


def test_without_arguments_sglang_leaves_more_for_itself_on_a_small_gpu() -> None:
    assert default_fraction(80 * GIB, 1) == pytest.approx(0.832, abs=0.005)  # (81920 - 13840) / 81920
    assert default_fraction(24 * GIB, 1) == pytest.approx(0.703, abs=0.005)


def test_what_the_learner_leaves_is_divided_and_the_servers_are_told_so() -> None:
    found = sized(served())
    assert found.mistakes == [] and [need.worker for need in found.needs] == ["actor-0", "teacher-0"]
    caches = cache_gib(found)
    assert caches["actor-0"] == pytest.approx(caches["teacher-0"])
    assert sum(need.total for need in found.needs) / GIB == pytest.approx(0.95 * 80 - 20)
    tokens = int(caches["actor-0"] * GIB / TOKEN_BYTES)
    told = ("--mem-fraction-static", "0.95", "--max-total-tokens", str(tokens), "--chunked-prefill-size", "2048")
    assert found.arguments == {"actor-0": told, "teacher-0": told}


def test_a_small_model_gets_no_more_cache_than_requests_can_fill() -> None:
    found = sized(served(), gib=139.0, shape=QWEN3_8B._replace(parameters=10**6, layers=2, kv_width=64))
    assert {told[3] for told in found.arguments.values()} == {str(4096 * 1024)}
    assert cache_gib(found)["actor-0"] == pytest.approx(4096 * 1024 * 2 * 2 * 64 * 2 / GIB)


def test_large_fractions_of_two_servers_are_no_mistake_and_the_second_gets_its_share_of_the_rest() -> None:
    """SGLang takes 0.4 of 80 GiB, and then 0.9 of what is free."""
    found = sized(served(("--mem-fraction-static=0.4",), ("--mem-fraction-static=0.9",)), learner=8.0)
    first, second = found.needs
    assert cache_gib(found)["actor-0"] == pytest.approx(32 - WEIGHTS_GIB)
    assert cache_gib(found)["teacher-0"] == pytest.approx(0.9 * (80 - first.total / GIB) - WEIGHTS_GIB)
    assert found.mistakes == [] and second.gpu == 0


def test_a_server_whose_size_the_user_says_starts_first() -> None:
    found = sized(served((), ("--max-total-tokens=10000",)))
    assert [need.worker for need in found.needs] == ["teacher-0", "actor-0"] == list(found.arguments)
    assert cache_gib(found)["teacher-0"] == pytest.approx(10000 * TOKEN_BYTES / GIB)
    assert found.arguments["teacher-0"][:2] == ("--mem-fraction-static", "0.95")


def test_a_cache_without_room_for_one_rollout_is_refused() -> None:
    (first, second) = sized(served(), learner=37.4).mistakes
    assert first.startswith(
        "actor.server: got 0.0 GiB for the cache of server-actor-0 on GPU 0, which it shares, expect"
    )
    assert "for a rollout of 992 tokens" in first and second.startswith("teacher.server: ")


def test_where_memory_or_model_is_unknown_the_user_must_limit_the_server() -> None:
    config = served(teacher=("--max-total-tokens=10000",))
    places = Places({"learner": 0}, {"actor": ((0,),), "teacher": ((0,),)})
    (mistake,) = size_servers(config, places, (), {0: 0.0}, lambda _: QWEN3_8B).mistakes
    assert mistake.startswith(
        "actor.server.args: server-actor-0 shares GPU 0, and how much memory that has is not known"
    )
    (mistake,) = sized(config, shape=None).mistakes
    assert "the size of its model is not known" in mistake
    # a server with a GPU of its own needs no plan
    alone = Places({"learner": 0}, {"actor": ((1,),), "teacher": ((2,),)})
    assert size_servers(served(), alone, (), {0: 0.0}, lambda _: QWEN3_8B) == ([], {}, [])


def test_a_server_alone_gets_no_arguments() -> None:
    places = Places({"learner": 0}, {"actor": ((1,),), "teacher": ((2,),)})
    found = size_servers(served(), places, (80.0,) * 3, {0: 20.0 * GIB}, lambda _: QWEN3_8B)
    assert found.arguments == {}
    assert cache_gib(found)["actor-0"] == pytest.approx(80 * default_fraction(80 * GIB, 1) - WEIGHTS_GIB)
