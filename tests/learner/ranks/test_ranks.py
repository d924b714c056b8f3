"""A learner of several ranks does what a learner of one does: the same gradients, weights, optimizer state and figures,
also where rollouts are left out. Each rank is a process (`same_as_one`), over gloo."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.models.packed_layout import balanced_packs
from tests.learner.ranks.processes import run_ranks
from tests.learner.ranks.same_as_one import CASES, FURTHER
from tests.torchao_packages import THERE, needs_torchao

FLOAT64 = 1e-9
ALLOWED = {
    "bad rollouts": 1e-5,  # float32
    "gradient not finite": 1e-5,
    # Of the largest number: products of differently packed rows round differently.
    "bfloat16 products": 0.12,  # 0.08 where the processor has AVX2 and no more
    "adapters, bfloat16 products": 0.12,
    "muon": 1e-3,  # its iteration is in bfloat16, and may round a number otherwise
    "muon on adapters": 1e-3,
    "8 bits": 1e-6,  # computed in float32
    "recurrent layers": 1e-5,  # its gates are float32 in any dtype
    "experts": 1e-4,  # transformers multiplies them in float32
    "half precision": 0.3,  # a sum of rounding errors
    "gathered": 0.02,  # shares are padded to one size
    "peak memory": 0.15,
}


IN_REPLICAS = ("k1", "value head", "adapters", "gradient not finite", "gathered", "peak memory")
"""Cases that copies of the parameters could change."""


QUICK = (
    *("k1", "value head", "reverse KL", "adapters", "moments on the host"),
    *("muon", "bad rollouts", "average", "resumed", "bytes", "gathered"),
    "recurrent layers",
)
"""Each thing that ranks divide or add up. The other cases are variations."""
FEW = (
    *("k1", "value head", "adapters", "bad rollouts", "resumed", "gathered", "recurrent layers"),
    *(("8 bits",) if THERE else ()),
)
"""Those of them for `make test`. `make test-slow` has the others, with divided sequences."""
SLOW = tuple(name for name in (*CASES, *FURTHER) if name not in QUICK and name != "8 bits")
FURTHER_OF_TWO = tuple(name for name in (*QUICK, *SLOW) if name not in FEW)


IN_CONTEXT = tuple(
    name
    for name in (*CASES, *ALLOWED)
    if "products" not in name and name not in ("gathered", "peak memory", "recurrent layers")
)
"""Cases of ranks that divide sequences. In bfloat16 their sums round otherwise: "half precision" says how exact they
are."""
MAIN = tuple(name for name in IN_CONTEXT if name in QUICK or name in FURTHER)
"""Those of them for `make test-slow` and for four ranks: all of them need minutes of two cores."""
OTHERS = tuple(name for name in IN_CONTEXT if name not in MAIN)


def results_of(n_ranks: int, *cases: str, replicas: int = 1, context: int = 1) -> list[dict[str, dict[str, float]]]:
    """What each rank found, by case."""
    ended = run_ranks(n_ranks, "tests.learner.ranks.same_as_one", *cases, replicas=replicas, context=context)
    for one in ended:
        assert one.returncode == 0, one.stderr[-3000:]
    return [json.loads(one.stdout.splitlines()[-1]) for one in ended]


def test_two_ranks_do_together_what_one_does_alone() -> None:
    expect_the_same(results_of(2, *FEW), FEW)


@needs_torchao
@pytest.mark.slow
def test_moments_in_8_bits_do_not_depend_on_the_number_of_ranks() -> None:
    expect_the_same(results_of(4, "8 bits", replicas=2), ["8 bits"])


@pytest.mark.slow
@pytest.mark.parametrize(("n_ranks", "cases"), [(2, FURTHER_OF_TWO), (4, (*QUICK, *SLOW))], ids=["2", "4"])
def test_ranks_do_together_what_one_does_alone_in_all_cases(n_ranks: int, cases: Sequence[str]) -> None:
    expect_the_same(results_of(n_ranks, *cases), cases)


@pytest.mark.slow
def test_copies_of_the_parameters_do_not_change_what_ranks_do() -> None:
    expect_the_same(results_of(2, *IN_REPLICAS, replicas=2), IN_REPLICAS)


@pytest.mark.slow
def test_replicas_of_several_ranks_do_what_one_does_alone() -> None:
    cases = tuple(dict.fromkeys((*QUICK, *IN_REPLICAS)))
    expect_the_same(results_of(4, *cases, replicas=2), cases)


@pytest.mark.parametrize(
    ("n_ranks", "context", "replicas", "cases"),
    [(2, 2, 1, MAIN), (2, 2, 1, OTHERS), (4, 2, 1, MAIN), (4, 4, 1, MAIN), (4, 2, 2, MAIN)],
    ids=["2-2-1", "2-2-1 others", "4-2-1", "4-4-1", "4-2-2"],
)
@pytest.mark.slow
def test_ranks_that_divide_each_sequence_do_what_one_does_alone(
    n_ranks: int, context: int, replicas: int, cases: Sequence[str]
) -> None:
    expect_the_same(results_of(n_ranks, *cases, replicas=replicas, context=context), cases)


def expect_the_same(of_ranks: Sequence[dict[str, dict[str, float]]], cases: Collection[str]) -> None:
    for found in of_ranks:
        assert found.keys() == set(cases), "every case ran"
        for case, differences in found.items():
            allowed = ALLOWED.get(case, FLOAT64)
            wrong = {name: value for name, value in differences.items() if not value <= allowed}
            assert not wrong, f"{case}: {wrong}, expected at most {allowed}"


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 400), st.integers(1, 7))
def test_items_are_divided_among_ranks_once_each_and_in_balance(lengths: list[int], budget: int, n_ranks: int) -> None:
    packs = balanced_packs(lengths, budget, n_ranks)
    assert len(packs) == n_ranks
    assert sorted(i for of_rank in packs for members in of_rank for i in members) == list(range(len(lengths)))
    for members in (members for of_rank in packs for members in of_rank):
        assert sum(lengths[i] for i in members) <= max(budget, max(lengths))
    rounds = [len(of_rank) for of_rank in packs]
    assert n_ranks == 1 or max(rounds) - min(rounds) <= 1 or len(lengths) < n_ranks * max(rounds)
    if n_ranks > 1 and len(lengths) >= n_ranks * max(rounds):
        tokens = sorted(sum(lengths[i] for members in of_rank for i in members) for of_rank in packs)
        assert tokens[-1] - tokens[0] <= max(rounds) * max(lengths), "no rank has more than one item per round more"


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_batch_that_fits_into_one_pack_is_divided_all_the_same(n_ranks: int) -> None:
    packs = balanced_packs([10] * 6, 4096, n_ranks)
    assert [[len(members) for members in of_rank] for of_rank in packs] == [[6 // n_ranks]] * n_ranks
