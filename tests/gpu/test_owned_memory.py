"""Memory that is neither an argument nor the graph's own: results stay right whoever frees it, and a
refusal names the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.library import custom_op

import pygraph

from .support import captured, compiled, randn, refusals

_CALLS = 6  # by then a graph replays, if there is one
_tables: dict[Any, torch.Tensor] = {}
_held: list[torch.Tensor] = []


@triton.jit(do_not_specialize=["offset"])
def _add_at(out, x, offset, count, block: tl.constexpr):  # noqa: ANN001, ANN202
    """x plus what lies ``offset`` elements behind x."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    mask = index < count
    y = x + tl.cast(offset, tl.int64)
    tl.store(out + index, tl.load(x + index, mask=mask) + tl.load(y + index, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["address"])
def _double_behind(out, address, distance, count, block: tl.constexpr):  # noqa: ANN001, ANN202
    """Twice what lies ``distance`` bytes behind an address."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    mask = index < count
    x = (tl.cast(address, tl.int64) + distance).to(tl.pointer_type(tl.float32))
    tl.store(out + index, 2 * tl.load(x + index, mask=mask), mask=mask)


@triton.jit
def _add(out, x, y, count, block: tl.constexpr):  # noqa: ANN001, ANN202
    index = tl.program_id(0) * block + tl.arange(0, block)
    mask = index < count
    tl.store(out + index, tl.load(x + index, mask=mask) + tl.load(y + index, mask=mask), mask=mask)


def _grid(x: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), 128),)


@custom_op("pygraph_test::add_table", mutates_args=())
def add_table(x: torch.Tensor) -> torch.Tensor:
    """A table per size, made at its first use; its kernel takes the address as a parameter."""
    if x.numel() not in _tables:
        _tables[x.numel()] = torch.arange(x.numel(), device=x.device, dtype=x.dtype)
    out = torch.empty_like(x)
    _add[_grid(x)](out, x, _tables[x.numel()], x.numel(), 128)
    return out


@custom_op("pygraph_test::add_in_workspace", mutates_args=())
def add_in_workspace(x: torch.Tensor) -> torch.Tensor:
    """A workspace per size; kernels of PyTorch's take its address in a struct."""
    workspace = _tables.setdefault(x.numel(), torch.empty_like(x))
    torch.add(x, 1, out=workspace)
    return workspace * 2


@custom_op("pygraph_test::add_mapped", mutates_args=())
def add_mapped(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's own operator is given wrappers of torch.func, which have no storage."""
    table = _tables.setdefault(x.numel(), torch.ones_like(x))
    return torch.vmap(torch.add)(x, table)


@custom_op("pygraph_test::add_in_streams_workspace", mutates_args=())
def add_in_streams_workspace(x: torch.Tensor) -> torch.Tensor:
    key = (x.numel(), torch.cuda.current_stream().cuda_stream)
    if key not in _tables:
        _tables[key] = torch.empty_like(x)
    workspace = _tables[key]
    _add[_grid(x)](workspace, x, x, x.numel(), 128)
    return workspace + 2


@custom_op("pygraph_test::keep_last", mutates_args=())
def keep_last(x: torch.Tensor) -> torch.Tensor:
    """Keeps what it has made last, and looks at it in the next call of a larger size only."""
    out = x * 2
    _tables["last"] = out
    return out + 2


@custom_op("pygraph_test::keep_while_capturing", mutates_args=())
def keep_while_capturing(x: torch.Tensor) -> torch.Tensor:
    out = x * 2
    if torch.cuda.is_current_stream_capturing():
        _held.append(torch.zeros_like(x))
    return out + 2


@custom_op("pygraph_test::add_from_host", mutates_args=())
def add_from_host(x: torch.Tensor) -> torch.Tensor:
    if "host" not in _tables:
        _tables["host"] = torch.ones(x.numel()).pin_memory()
    return x + torch.empty_like(x).copy_(_tables["host"], non_blocking=True)


@custom_op("pygraph_test::add_by_difference", mutates_args=())
def add_by_difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    elements = (y.data_ptr() - x.data_ptr()) // 4
    _add_at[_grid(x)](out, x, elements, x.numel(), 128)
    return out


@custom_op("pygraph_test::double_from_before", mutates_args=())
def double_from_before(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _double_behind[_grid(x)](out, x.data_ptr() - 4096, 4096, x.numel(), 128)
    return out


for _op in (
    *(add_table, add_in_workspace, add_in_streams_workspace, keep_last, keep_while_capturing),
    *(add_from_host, add_mapped, double_from_before),
):
    _op.register_fake(lambda x: torch.empty_like(x))
add_by_difference.register_fake(lambda x, y: torch.empty_like(x))


@pytest.fixture(autouse=True)
def no_tables() -> Iterator[None]:
    yield
    _tables.clear()
    _held.clear()


def _take_free_memory() -> None:
    """Whatever was freed is now somebody else's, and holds NaN."""
    torch.cuda.synchronize()
    taken = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(4, 22) for _ in range(8)]
    torch.cuda.synchronize()
    del taken


def _check(
    function: Callable[..., torch.Tensor],
    expected: Callable[..., torch.Tensor],
    *,
    inputs: int = 1,
    elements: int = 1000,
    disturb: Callable[[], object] = _tables.clear,
) -> None:
    """Results are right before and after ``disturb``, whatever the memory holds that it has freed."""
    model = compiled(function)
    with torch.no_grad():
        for call in range(3 * _CALLS):
            if call % _CALLS == _CALLS - 1:
                disturb()
                _take_free_memory()
            args = [randn(elements) for _ in range(inputs)]
            torch.testing.assert_close(model(*args), expected(*args), msg=f"call {call}")
    torch.cuda.synchronize()


def _expect_refusal(name: str) -> None:
    assert captured() == [], pygraph.stats()
    assert any(f"pygraph_test::{name}" in reason for reason in refusals()), refusals()


def _arange(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel(), device=x.device, dtype=x.dtype)


def test_a_table_that_is_made_anew() -> None:
    _check(lambda x: add_table(x * 2) + 1, lambda x: x * 2 + _arange(x) + 1)
    _expect_refusal("add_table")


def test_a_workspace_in_kernels_of_pytorch() -> None:
    _check(lambda x: add_in_workspace(x * 2) + 1, lambda x: (x * 2 + 1) * 2 + 1)
    _expect_refusal("add_in_workspace")


def test_a_table_in_a_wrapper() -> None:
    # What looks for aliases of custom operators' arguments fails at a vmap inside, with any backend.
    with torch._functorch.config.patch(check_custom_op_aliasing=False):
        _check(lambda x: add_mapped(x * 2) + 1, lambda x: x * 2 + 2)
    _expect_refusal("add_mapped")


def test_a_workspace_per_stream() -> None:
    _check(lambda x: add_in_streams_workspace(x * 2) + 1, lambda x: x * 4 + 3)
    _expect_refusal("add_in_streams_workspace")
    with torch.no_grad():
        for _ in range(40):  # more than PyTorch has streams
            with torch.cuda.stream(torch.cuda.Stream()):
                x = randn(1000)
                torch.testing.assert_close(add_in_streams_workspace(x), x * 2 + 2)


def test_memory_that_the_next_call_replaces() -> None:
    _check(lambda x: keep_last(x * 2) + 1, lambda x: x * 4 + 3, disturb=lambda: None)
    _expect_refusal("keep_last")


# The second one is over what is mapped in small pages.
@pytest.mark.parametrize("elements", [1000, 24_000_000])
def test_memory_of_a_recording_that_an_operator_keeps(elements: int) -> None:
    _check(
        lambda x: keep_while_capturing(x * 2) + 1,
        lambda x: x * 4 + 3,
        elements=elements,
        disturb=lambda: None,
    )
    _expect_refusal("keep_while_capturing")
    assert _held
    for number, tensor in enumerate(_held):  # it can be used, like any other
        tensor.fill_(float(number))
    for number, tensor in enumerate(_held):
        assert torch.equal(tensor, torch.full_like(tensor, float(number)))
    _held.clear()
    model = compiled(lambda x: torch.relu(x) * 2)
    with torch.no_grad():
        for _ in range(4):
            x = randn(1000)
            torch.testing.assert_close(model(x), torch.relu(x) * 2)
    assert len(captured()) == 1


def test_pinned_memory_that_is_freed() -> None:
    _check(lambda x: add_from_host(x * 2) + 1, lambda x: x * 2 + 2)
    _expect_refusal("add_from_host")


def test_a_difference_of_addresses() -> None:
    _check(
        lambda x, y: add_by_difference(x, y) * 2,
        lambda x, y: (x + y) * 2,
        inputs=2,
        disturb=lambda: _held.append(randn(5000)),
    )
    _expect_refusal("add_by_difference")


def test_an_address_before_its_allocation() -> None:
    _check(lambda x: double_from_before(x) + 1, lambda x: x * 2 + 1)
    _expect_refusal("double_from_before")


@pytest.mark.parametrize("plans", [4, 40, None])
@pytest.mark.parametrize("length", [1024, 1000, 1009])
def test_ffts_whose_plans_are_dropped(length: int, plans: int | None) -> None:
    """By others that need room in the cache, or because it is cleared."""
    cache = torch.backends.cuda.cufft_plan_cache
    before = cache.max_size
    cache.clear()  # of what other tests have left
    model = compiled(lambda x: torch.fft.fft(x * 2).abs() + 1)

    def press() -> None:
        if plans is None:
            cache.clear()
        for other in range(3, 60):
            torch.fft.fft(randn(8, 97 * other))
        _take_free_memory()

    try:
        if plans is not None:
            cache.max_size = plans
        with torch.no_grad():
            for call in range(3 * _CALLS):
                if call % _CALLS == _CALLS - 1:
                    assert len(captured()) == (plans != 4 and call < _CALLS)
                    press()
                x = randn(16, length)
                torch.testing.assert_close(model(x), torch.fft.fft(x * 2).abs() + 1)
        assert captured() == [] and "cuFFT" in refusals()[0]
    finally:
        cache.max_size = before


def test_plans_that_stay_keep_their_graph() -> None:
    model = compiled(lambda x: torch.fft.fft(x * 2).abs() + 1)
    with torch.no_grad():
        for _ in range(_CALLS):
            x = randn(16, 1024)
            torch.testing.assert_close(model(x), torch.fft.fft(x * 2).abs() + 1)
    assert len(captured()) == 1, pygraph.stats()


def test_libraries_keep_their_graphs() -> None:
    attention = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True).cuda()
    convolution = torch.nn.Conv2d(1, 8, 3, padding=1).cuda()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = attention(x)
        return convolution(y.unsqueeze(1)).relu().mean((1, 2)).cumsum(-1).sort(-1).values

    model = compiled(function)
    for _ in range(_CALLS):
        x = randn(4, 32, 64)
        model(x).sum().backward()
    assert refusals() == [], refusals()
    assert {row.name for row in captured()} == {"forward", "backward"}, pygraph.stats()
