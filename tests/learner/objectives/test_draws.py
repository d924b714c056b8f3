"""Random numbers of tokens: they depend on what is named, on all of it, and on nothing else."""

from __future__ import annotations

import numpy as np

from learner.objectives.draws import uniforms

AT = np.array([2, 3, 7], np.int64)


def test_a_token_has_the_same_numbers_in_a_part_of_its_rollout_as_in_the_whole() -> None:
    whole = uniforms(0, 5, "a", "math", AT, 4)
    assert whole.shape == (3, 4) and 0.0 <= whole.min() < whole.max() < 1.0
    np.testing.assert_array_equal(uniforms(0, 5, "a", "math", AT[:2], 4), whole[:2])
    np.testing.assert_array_equal(uniforms(0, 5, "a", "math", AT[2:], 4), whole[2:])


def test_seed_step_rollout_and_teacher_each_make_a_difference() -> None:
    of = [(0, 5, "a", "math"), (1, 5, "a", "math"), (0, 6, "a", "math"), (0, 5, "b", "math"), (0, 5, "a", "style")]
    drawn = [uniforms(*key, AT, 4) for key in of]
    assert len({value for one in drawn for value in one.flat}) == len(of) * 12


def test_they_are_spread_evenly() -> None:
    shares = np.histogram(uniforms(0, 0, "a", "", np.arange(4000), 4), bins=10, range=(0, 1))[0] / 16000
    assert np.abs(shares - 0.1).max() < 0.01  # four standard deviations


def test_nothing_to_draw() -> None:
    assert uniforms(0, 0, "a", "", AT[:0], 4).shape == (0, 4) and uniforms(0, 0, "a", "", AT, 0).shape == (3, 0)
