"""The parts of verification that need no GPU."""

from __future__ import annotations

import torch

from pygraph import verify


def test_a_result_within_the_spread_of_uncaptured_runs_is_accepted() -> None:
    torch.manual_seed(0)
    expected = torch.randn(1000)
    samples = [expected + 1e-6 * torch.randn(1000) for _ in range(2)]
    assert verify._is_within_spread(expected + 1e-6 * torch.randn(1000), expected, samples)
    assert not verify._is_within_spread(expected + 1e-4 * torch.randn(1000), expected, samples)


def test_a_difference_is_refused_where_uncaptured_runs_agree() -> None:
    expected = torch.randn(100)
    replayed = expected.clone()
    replayed[5] += 1e-6
    assert not verify._is_within_spread(replayed, expected, [expected.clone(), expected.clone()])


def test_elements_that_never_settle_do_not_count() -> None:
    expected = torch.zeros(10)
    samples = [expected.clone() for _ in range(2)]
    replayed = expected.clone()
    replayed[3], samples[0][3] = float("nan"), 7.0  # memory that nobody writes
    assert verify._is_within_spread(replayed, expected, samples)


def test_garbage_is_never_within_the_spread() -> None:
    expected = torch.randn(100)
    sample = expected.clone()
    sample[0] += 1e-6
    garbage = torch.full((100,), float("nan"))
    assert not verify._is_within_spread(garbage, expected, [sample, expected.clone()])
