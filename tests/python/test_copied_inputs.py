"""Functions that work on copies of their inputs, on CPU tensors and without a recording."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph import copied_inputs
from pygraph.copied_inputs import CopiedInputs


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        copied_inputs, "_is_on_gpu", lambda x: isinstance(x, torch.Tensor) and x.numel() > 0
    )


def _call(
    function: Callable[[list[Any]], Sequence[Any]],
    stand_ins: list[Any],
    fixed: frozenset[int] = frozenset(),
    written: frozenset[int] = frozenset(),
) -> Sequence[Any]:
    """Counts as fixed memory all but what the caller has."""
    others = {t.untyped_storage().data_ptr() for t in stand_ins if isinstance(t, torch.Tensor)}
    depth = [0]

    @contextlib.contextmanager
    def fixed_memory() -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    def consuming(args: list[Any]) -> Sequence[Any]:
        assert depth[0] == 1
        own = list(args)
        args.clear()
        return function(own)

    def is_fixed(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in others

    return CopiedInputs(fixed, written).call(consuming, stand_ins, is_fixed, fixed_memory())


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_the_function_gets_copies_of_what_may_move() -> None:
    x, weight = torch.randn(4), torch.randn(4)
    seen: list[Any] = []

    def function(args: list[Any]) -> list[Any]:
        seen.extend(args)
        return [args[0] + args[1]]

    (result,) = _call(function, [x, weight, 7, None], fixed=frozenset({1}))
    assert torch.equal(seen[0], x) and not _shares(seen[0], x)
    assert seen[1:] == [weight, 7, None] and seen[1] is weight
    assert torch.equal(result, x + weight)


def test_layouts_and_lazy_bits_of_copies_are_those_of_the_inputs() -> None:
    inputs = [
        torch.randn(3, 4).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
    ]

    def function(args: list[Any]) -> list[Any]:
        for copy, original in zip(args, inputs, strict=True):
            assert torch.equal(copy, original)
            assert (copy.stride(), copy.is_conj()) == (original.stride(), original.is_conj())
        return []

    assert _call(function, list(inputs)) == []


def test_results_leave_fixed_memory_together_as_they_lie() -> None:
    inner: list[torch.Tensor] = []

    def function(args: list[Any]) -> list[Any]:
        y = args[0] * 2
        inner.append(y)
        return [y, y[2:], 5, None]

    x = torch.arange(6.0)
    whole, part, number, nothing = _call(function, [x])
    assert torch.equal(whole, x * 2) and torch.equal(part, x[2:] * 2)
    assert not _shares(whole, inner[0]) and _shares(whole, part)
    assert part.storage_offset() == 2 and (number, nothing) == (5, None)


def test_a_result_that_is_an_input_is_the_callers_own() -> None:
    x, weight = torch.arange(6.0), torch.randn(4)
    same, view, parameter = _call(
        lambda args: [args[0], args[0].view(2, 3)[1], args[1]], [x, weight], fixed=frozenset({1})
    )
    assert same is x and parameter is weight
    assert _shares(view, x) and torch.equal(view, x[3:])


def test_a_result_at_the_address_of_a_copy_is_none_of_it_unless_it_has_its_storage() -> None:
    """A copy that was freed may have left its address to a result."""

    def function(args: list[Any]) -> list[Any]:
        same_address = torch.from_numpy(args[0].numpy())
        assert same_address.data_ptr() == args[0].data_ptr()
        return [same_address]

    x = torch.arange(6.0)
    (result,) = _call(function, [x])
    assert not _shares(result, x) and torch.equal(result, x)


def test_what_is_written_goes_back() -> None:
    state, x = torch.zeros(2, 3).t(), torch.randn(3, 2)

    def function(args: list[Any]) -> list[Any]:
        args[0].add_(args[1])
        assert torch.equal(state, torch.zeros(3, 2))  # not yet
        return [args[0] * 2]

    (result,) = _call(function, [state, x], written=frozenset({0}))
    assert torch.equal(state, x) and torch.equal(result, x * 2)


def test_a_constant_is_handed_through() -> None:
    constant = torch.randn(3)
    x = torch.randn(3)

    def function(args: list[Any]) -> list[Any]:
        return [constant]

    call = CopiedInputs(frozenset(), frozenset()).call
    (result,) = call(function, [x], lambda tensor: False, contextlib.nullcontext())
    assert result is constant


@pytest.mark.parametrize("raises", [False, True])
def test_the_captures_pool_is_set_back_whatever_happens(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def note(step: str) -> Callable[[int, str], None]:
        return lambda device, pool: steps.append(f"{step} {pool}")

    @contextlib.contextmanager
    def use_mem_pool(pool: Any, device: int) -> Iterator[None]:
        steps.append(f"use {pool.id}")
        try:
            yield
        finally:
            steps.append(f"leave {pool.id}")

    for name, step in (
        ("_cuda_endAllocateToPool", "end"),
        ("_cuda_beginAllocateCurrentThreadToPool", "begin"),
        ("_cuda_releasePool", "release"),
    ):
        monkeypatch.setattr(torch._C, name, note(step), raising=False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    fixed, own = (SimpleNamespace(id=name) for name in ("fixed", "own"))
    expected = pytest.raises(RuntimeError) if raises else contextlib.nullcontext()
    with expected, copied_inputs.allocating_from(fixed, own, 0):  # type: ignore[arg-type]
        steps.append("allocate")
        if raises:
            raise RuntimeError("capture refused")
    # Beginning takes a second reference, which must not outlive it.
    assert steps == ["end own", "use fixed", "allocate", "leave fixed", "begin own", "release own"]
