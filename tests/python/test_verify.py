"""The parts of verification that need no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pygraph import compare, runtime, verify
from pygraph.recorder import Recording


def test_a_result_within_the_spread_of_uncaptured_runs_is_accepted() -> None:
    torch.manual_seed(0)
    expected = torch.randn(1000)
    samples = [expected + 1e-6 * torch.randn(1000) for _ in range(2)]
    assert compare.is_within_spread(expected + 1e-6 * torch.randn(1000), expected, samples)
    assert not compare.is_within_spread(expected + 1e-4 * torch.randn(1000), expected, samples)


def test_a_difference_is_refused_where_uncaptured_runs_agree() -> None:
    expected = torch.randn(100)
    replayed = expected.clone()
    replayed[5] += 1e-6
    assert not compare.is_within_spread(replayed, expected, [expected.clone(), expected.clone()])


def test_elements_that_never_settle_do_not_count() -> None:
    expected = torch.zeros(10)
    samples = [expected.clone() for _ in range(2)]
    replayed = expected.clone()
    replayed[3], samples[0][3] = float("nan"), 7.0  # memory that nobody writes
    assert compare.is_within_spread(replayed, expected, samples)


def test_garbage_is_never_within_the_spread() -> None:
    expected = torch.randn(100)
    sample = expected.clone()
    sample[0] += 1e-6
    garbage = torch.full((100,), float("nan"))
    assert not compare.is_within_spread(garbage, expected, [sample, expected.clone()])


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


class _Refusing:
    """A graph and a recording pair that fail at one step."""

    output_bytes = 0
    donated: tuple[int, ...] = ()

    def __init__(self, refused: str, error: Exception) -> None:
        self._refused = refused
        self._error = error

    def _step(self, name: str) -> None:
        if name == self._refused:
            raise self._error

    def poison(self) -> None:
        self._step("poison")

    def poison_workspace(self, stream: int) -> None:
        self._step("poison_workspace")

    def replay(
        self, arguments: list[torch.Tensor], gives_away: bool, poison: int
    ) -> list[torch.Tensor]:
        self._step("replay")
        return [arguments[0] + 1]

    def untouched(self) -> bool:
        return True


def _compare(fake: _Refusing, by_fingerprint: bool) -> verify.Verification:
    """Verifies a function that adds one; its result must be right whatever fails."""
    x = torch.ones(4)
    run = verify.Run(lambda args: [args[0] + 1], [x], Recording(fake, fake, []), frozenset())
    result = run.compare_fingerprints() if by_fingerprint else run.compare_bits()
    assert torch.equal(result.outputs[0], x + 1)
    return result


@pytest.mark.parametrize("step", ["poison", "poison_workspace", "replay"])
@pytest.mark.parametrize("by_fingerprint", [False, True])
def test_memory_that_verification_cannot_have_leaves_the_call_uncaptured(
    step: str, by_fingerprint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    result = _compare(_Refusing(step, torch.OutOfMemoryError(step)), by_fingerprint)
    assert result.failure == "out of memory while verifying"


@pytest.mark.parametrize("by_fingerprint", [False, True])
def test_a_graph_that_cannot_be_launched_is_refused_with_the_drivers_words(
    by_fingerprint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    error = runtime.engine().DriverError("graph_launch: out of resources")
    result = _compare(_Refusing("replay", error), by_fingerprint)
    assert result.failure == "the graph cannot be launched: graph_launch: out of resources"
