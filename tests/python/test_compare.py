"""Results that differ: by chance, or because a graph is wrong? On the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.verify import compare, distance
from pygraph.verify.bits import LARGE_BYTES, differing

Results = list[torch.Tensor]


def _mismatches(replays: list[Results], runs: list[Results]) -> list[compare.Mismatch]:
    """What is found wrong after these: replays on ones, on zeros, on ones again; runs."""
    comparison = compare.Comparison(replays[0])
    comparison.find_unwritten(replays[1])
    for replay in replays[2:]:
        comparison.add_replay(replay)
    for run in runs:
        comparison.add_run(run)
    return comparison.mismatches()


def _is_plausible(replayed: torch.Tensor, runs: list[torch.Tensor]) -> bool:
    """Replays with this result, every element written."""
    return not _mismatches([[replayed]] * 3, [[run] for run in runs])


def test_a_result_within_the_spread_of_uncaptured_runs_is_accepted() -> None:
    torch.manual_seed(0)
    exact = torch.randn(1000)
    runs = [exact + 1e-6 * torch.randn(1000) for _ in range(3)]
    assert _is_plausible(exact + 1e-6 * torch.randn(1000), runs)
    assert not _is_plausible(exact + 1e-2 * torch.randn(1000), runs)


def test_a_difference_is_refused_where_uncaptured_runs_agree() -> None:
    exact = torch.randn(100)
    replayed = exact.clone()
    replayed[5] += 1e-6
    assert _is_plausible(exact.clone(), [exact] * 3)
    assert not _is_plausible(replayed, [exact] * 3)


def test_a_rounding_is_accepted_where_the_order_of_additions_is_left_to_chance() -> None:
    """Another result of the same function shows that it is."""
    torch.manual_seed(0)
    exact = torch.randn(1000)
    rounded = exact.clone()
    rounded[3] *= 1 + 2**-20
    noisy = [exact + 1e-6 * torch.randn(1000) for _ in range(3)]
    runs = [[exact, sample] for sample in noisy]
    assert _mismatches([[rounded, noisy[0]]] * 3, runs) == []
    wrong = exact.clone()
    wrong[3] += 1
    assert _mismatches([[wrong, noisy[0]]] * 3, runs)[0].position == 0


def test_replays_that_differ_from_each_other_show_that_chance_is_at_work() -> None:
    """Uncaptured kernels start on an idle GPU each and may agree by that alone."""
    exact = torch.randn(1000)
    rounded = exact.clone()
    rounded[3] *= 1 + 2**-20
    runs = [[exact]] * 8
    assert _mismatches([[rounded], [rounded], [rounded]], runs)[0].position == 0
    assert _mismatches([[rounded], [exact], [exact]], runs) == []
    wrong = exact.clone()
    wrong[3] += 1
    assert _mismatches([[wrong], [exact], [exact]], runs)[0].position == 0


def test_further_replays_show_chance_as_well() -> None:
    exact = torch.randn(1000)
    rounded = exact.clone()
    rounded[3] *= 1 + 2**-20
    replays = [[rounded], [rounded], [rounded], [exact]]
    assert _mismatches(replays, [[exact]] * 8) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_numbers_are_never_rounded(dtype: torch.dtype) -> None:
    exact = torch.ones(1000, dtype=dtype)
    other = exact.clone()
    other[0] = 0
    noisy = [torch.randn(10) for _ in range(3)]
    runs = [[exact, sample] for sample in noisy]
    assert _mismatches([[other, noisy[0]]] * 3, runs)[0].position == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_as_many_elements_may_flip_as_in_uncaptured_runs(dtype: torch.dtype) -> None:
    """Masks of what lies near zero, where the order of additions is left to chance."""
    torch.manual_seed(0)
    mask = torch.rand(10000) < 0.5

    def flipped(count: int) -> torch.Tensor:
        sample = mask.clone()
        sample[torch.randperm(10000)[:count]] ^= True
        return sample.to(dtype)

    runs = [flipped(8) for _ in range(4)]
    assert _is_plausible(flipped(8), runs)
    assert not _is_plausible(flipped(100), runs)
    assert not _is_plausible(flipped(1), [mask.to(dtype)] * 4)


def test_elements_that_differ_between_runs_are_not_judged_where_they_agree_by_chance() -> None:
    """A tile of 64 elements that is another one in each execution; here and there it agrees roughly."""
    torch.manual_seed(0)
    exact = torch.randn(10000)

    def sample(factor: float) -> list[torch.Tensor]:
        result = exact.clone()
        result[100:164] = torch.linspace(-9, 9, 64).roll(7) * factor
        return [result]

    def judged(replay: list[torch.Tensor]) -> list[compare.Mismatch]:
        comparison = compare.Comparison(replay)
        comparison.find_unwritten(replay)
        for factor in (1, -2, 3):
            comparison.add_run(sample(factor))
        assert comparison.mismatches()[0].replay.error > 0.01
        comparison.add_run(sample(-4))
        comparison.add_replay(replay)
        return comparison.mismatches()

    replay = sample(-1)
    replay[0][100:110] = sample(1)[0][100:110] * 1.04
    assert judged(replay) == []
    replay[0][300:320] *= 1.04  # which never differ between runs
    assert judged(replay)[0].replay.outliers < 64


def test_a_nan_where_uncaptured_runs_agree_on_a_number_is_poison() -> None:
    """However many other elements flip from run to run."""
    torch.manual_seed(0)
    value = torch.randn(10000)

    def flipped(first: int) -> torch.Tensor:
        sample = value.clone()
        sample[first : first + 20] *= -1
        return sample

    runs = [flipped(100 * i) for i in range(4)]
    assert _is_plausible(flipped(1000), runs)
    poisoned = flipped(1000)
    poisoned[5000] = float("nan")
    assert not _is_plausible(poisoned, runs)
    unsettled = flipped(1000)
    unsettled[110] = float("nan")  # one run has another number there
    assert _is_plausible(unsettled, runs)


def test_a_result_of_nan_is_poison_even_where_runs_never_agree() -> None:
    runs = [torch.full((100,), float(i)) for i in range(4)]
    assert _is_plausible(torch.full((100,), 2.0), runs)
    assert not _is_plausible(torch.full((100,), float("nan")), runs)
    runs[2][:] = float("nan")
    assert _is_plausible(torch.full((100,), float("nan")), runs)


def test_infinities_and_nan_that_are_the_same_agree() -> None:
    exact = torch.randn(100)
    exact[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    sample = exact.clone()
    sample[50] *= 1 + 2**-20
    assert _is_plausible(sample, [exact, sample, exact])
    wrong = exact.clone()
    wrong[0] = 0
    assert not _is_plausible(wrong, [exact, sample, exact])


def test_elements_that_never_settle_do_not_count() -> None:
    exact = torch.zeros(10)
    runs = [exact.clone() for _ in range(3)]
    replayed = exact.clone()
    replayed[3], runs[0][3] = float("nan"), 7.0  # memory that nobody writes
    assert _is_plausible(replayed, runs)


def test_elements_that_keep_the_poison_do_not_count() -> None:
    exact = torch.randn(10)
    ones, zeros = exact.clone(), exact.clone()
    ones.view(torch.int32)[3], zeros[3] = -1, 0.0
    assert _mismatches([[ones], [zeros], [ones]], [[exact]] * 3) == []
    assert _mismatches([[ones], [exact], [ones]], [[exact]] * 3)[0].position == 0


def test_padding_that_nobody_writes_shows_no_chance() -> None:
    exact = torch.randn(10)
    ones, zeros = exact.clone(), exact.clone()
    ones.view(torch.int32)[3], zeros[3] = -1, 0.0
    for replay in (ones, zeros):
        replay[5] *= 1 + 2**-20
    runs = [exact.clone() for _ in range(4)]
    for i, run in enumerate(runs):
        run[3] = i  # what the memory held before
    assert _mismatches([[ones], [zeros], [ones]], [[run] for run in runs])[0].position == 0


def test_garbage_is_never_plausible() -> None:
    exact = torch.randn(100)
    sample = exact.clone()
    sample[0] += 1e-6
    garbage = torch.full((100,), float("nan"))
    assert not _is_plausible(garbage, [exact, sample, exact])
    one_element = exact.clone()
    one_element[7] = float("nan")
    assert not _is_plausible(one_element, [exact, sample, exact])


def test_large_results_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "_CHUNK", 64)
    torch.manual_seed(0)
    exact = torch.randn(1000)
    runs = [exact + 1e-6 * torch.randn(1000) for _ in range(3)]
    assert _is_plausible(exact + 1e-6 * torch.randn(1000), runs)
    wrong = exact.clone()
    wrong[999] += 1
    assert not _is_plausible(wrong, runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
def test_elements_that_keep_both_poisons_are_unwritten(dtype: torch.dtype) -> None:
    ones = torch.full((4 * 8,), 0xFF, dtype=torch.uint8).view(dtype)
    zeros = torch.zeros_like(ones)
    ones[1] = zeros[1] = 3
    zeros[2] = 1  # written by one run only: not padding
    mask = compare.unwritten(ones, zeros)
    assert mask[0]
    assert not mask[1]
    assert not mask[2]
    assert mask[3:].all()


def test_a_distance_keeps_no_graph_of_results_that_require_a_gradient() -> None:
    """It would hold several times a result's memory until all of the result is compared."""
    saved: list[torch.Tensor] = []
    result = torch.ones(4, requires_grad=True)
    other = result * 1.01
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda none: result):
        (found,) = distance.distances([lambda: distance.Pair(result, other)])
    assert found.outliers == 0
    assert saved == []


class _Waits(TorchDispatchMode):
    """Counts the operators that are called, and those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.waits = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        waiting = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item")
        self.waits += func.overloadpacket.__name__ in waiting
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_nothing_waits_for_each_result_alone(noise: float) -> None:
    torch.manual_seed(0)
    exact = [torch.rand(100) + 1 for _ in range(50)]

    def sample() -> Results:
        return [exact[0] + noise * torch.randn(100), *(x.clone() for x in exact[1:])]

    samples = [sample() for _ in range(6)]
    with _Waits() as calls:
        assert _mismatches(samples[:3], samples[3:]) == []
    assert calls.waits == 0
    assert calls.operators < 22 * len(exact)  # of six executions


def test_masks_are_kept_only_where_elements_are_set() -> None:
    exact = [torch.ones(4), torch.ones(4)]
    ones, zeros = [x.clone() for x in exact], [x.clone() for x in exact]
    ones[1].view(torch.int32)[3], zeros[1][3] = -1, 0.0
    comparison = compare.Comparison(ones)
    comparison.find_unwritten(zeros)
    comparison.add_run(exact)
    assert comparison._unwritten[0] is None and comparison._unwritten[1] is not None
    assert comparison._unwritten[1].tolist() == [False, False, False, True]
    assert comparison._nan == [None, None] and comparison._garbage == [None, None]
    assert comparison.mismatches() == []


def test_pieces_are_judged_by_the_median_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those with elements that do not agree at first sight; the others' sums stay."""
    monkeypatch.setattr(distance, "_CHUNK", 4)
    other = torch.ones(12)
    result = other * 1.01
    other[5], result[5] = 1e-6, 1e-2  # agrees beside its piece's median
    other[9], result[9] = 1e-6, 1.0
    pairs = [distance.Pair(result, other), distance.Pair(other, other)]
    found = distance.distances([lambda pair=pair: pair for pair in pairs])  # type: ignore[misc]
    assert [f.outliers for f in found] == [1, 0]
    norm = other.double().square().sum() - other[9].double() ** 2
    error = (result - other).double().square().sum() - (result[9] - other[9]).double() ** 2
    assert found[0].error == pytest.approx(float((error / norm).sqrt()))
    assert found[1].error == 0.0


def test_results_that_differ_are_named_in_their_order() -> None:
    large = torch.zeros((LARGE_BYTES >> 2) + 1)
    seen = [torch.zeros(3), large, torch.zeros(2, 2), torch.zeros(0), torch.ones(2), large]
    results = [torch.zeros(3), large.clone(), torch.zeros(2, 2).t(), torch.zeros(0), torch.zeros(2)]
    results.append(large + 1)
    assert differing(seen, results, in_bits=True) == [2, 4, 5]
    assert differing(seen, results[:1] + seen[1:], in_bits=True) == []
