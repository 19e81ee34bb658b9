"""Functions that cannot be relocated stay uncaptured: results are right, and the refusal names the
operator."""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch.library import custom_op

import pygraph

from .support import captured, compiled, randn, refusals

_CALLS = 8  # by then a graph replays, if there is one


@triton.jit
def _address_in(table):  # noqa: ANN001, ANN202
    low = tl.load(table) | (tl.load(table + 1) << 16)
    return low | (tl.load(table + 2) << 32) | (tl.load(table + 3) << 48)


@triton.jit
def _add(out, x, table, count, block: tl.constexpr):  # noqa: ANN001, ANN202
    index = tl.program_id(0) * block + tl.arange(0, block)
    y = _address_in(table).to(tl.pointer_type(tl.float32))
    total = tl.load(x + index, mask=index < count) + tl.load(y + index, mask=index < count)
    tl.store(out + index, total, mask=index < count)


@triton.jit
def _add_in_place(table, x, count, block: tl.constexpr):  # noqa: ANN001, ANN202
    index = tl.program_id(0) * block + tl.arange(0, block)
    state = _address_in(table).to(tl.pointer_type(tl.float32))
    total = tl.load(state + index, mask=index < count) + tl.load(x + index, mask=index < count)
    tl.store(state + index, total, mask=index < count)


def _hide(x: torch.Tensor) -> torch.Tensor:
    """Device memory that holds the tensor's address, in four pieces of 16 bits."""
    table = torch.empty(4, dtype=torch.int64, device=x.device)
    for i in range(4):
        table[i : i + 1].fill_((x.data_ptr() >> (16 * i)) & 0xFFFF)
    return table


def _grid(x: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), 128),)


@custom_op("pygraph_test::hidden_add", mutates_args=())
def hidden_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, whose kernel finds y in device memory."""
    out = torch.empty_like(x)
    _add[_grid(x)](out, x, _hide(y), x.numel(), 128)
    return out


@custom_op("pygraph_test::hidden_add_in_place", mutates_args={"state"})
def hidden_add_in_place(state: torch.Tensor, x: torch.Tensor) -> None:
    _add_in_place[_grid(x)](_hide(state), x, x.numel(), 128)


@custom_op("pygraph_test::copy_of_rows", mutates_args=())
def copy_of_rows(x: torch.Tensor) -> torch.Tensor:
    """A copy, of which one call of the CUDA runtime makes the even rows, and one the odd rows."""
    out = torch.empty_like(x)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    row = x.shape[1] * x.element_size()
    to, source = out.data_ptr(), x.data_ptr()
    for start in (0, row):
        copied = _cudart().cudaMemcpy2DAsync(
            *(ctypes.c_void_p(to + start), ctypes.c_size_t(2 * row)),
            *(ctypes.c_void_p(source + start), ctypes.c_size_t(2 * row)),
            *(ctypes.c_size_t(row), ctypes.c_size_t(x.shape[0] // 2), 3, stream),
        )
        assert copied == 0
    return out


hidden_add.register_fake(lambda x, y: torch.empty_like(x))
copy_of_rows.register_fake(lambda x: torch.empty_like(x))
hidden_add.register_autograd(lambda ctx, grad: (hidden_add(grad * 0.5, grad * 0.5), grad))


def _cudart() -> ctypes.CDLL:
    folder = os.path.dirname(torch.__file__)
    found = glob.glob(os.path.join(folder, "..", "nvidia", "**", "libcudart.so*"), recursive=True)
    return ctypes.CDLL(found[0] if found else "libcudart.so")


def _expect_refusals(operator: str, count: int = 1) -> None:
    assert captured() == [], pygraph.stats()
    assert [f"operator pygraph_test::{operator}," in reason for reason in refusals()] == [
        True
    ] * count, refusals()


@pytest.mark.parametrize(
    ("function", "expected", "operator"),
    [
        (lambda x: torch.relu(hidden_add(x * 2, x)) + 1, lambda x: torch.relu(x * 3) + 1, "hidden_add"),
        (lambda x: copy_of_rows(x * 2) + 1, lambda x: x * 2 + 1, "copy_of_rows"),
    ],
    ids=["an address in device memory", "a copy of several rows"],
)
@torch.no_grad()
def test_what_cannot_be_relocated(
    function: Callable[[torch.Tensor], torch.Tensor],
    expected: Callable[[torch.Tensor], torch.Tensor],
    operator: str,
) -> None:
    model = compiled(function)
    for call in range(_CALLS):
        x = randn(64, 32)
        torch.testing.assert_close(model(x), expected(x), msg=f"call {call}")
    _expect_refusals(operator)


class Accumulator(torch.nn.Module):
    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(256, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden_add_in_place(self.state, x)
        return self.state * 2


@torch.no_grad()
def test_a_hidden_write_happens_once_per_call() -> None:
    module = Accumulator()
    model = compiled(module)
    expected = torch.zeros(256, device="cuda")
    for call in range(_CALLS):
        x = randn(256)
        expected += x
        torch.testing.assert_close(model(x), expected * 2, msg=f"call {call}")
        torch.testing.assert_close(module.state, expected, msg=f"call {call}")
    _expect_refusals("hidden_add_in_place")


def test_training() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = module[0](x)
        return module[1](hidden_add(y, y.detach())).square().mean()

    model = compiled(loss)
    for call in range(_CALLS):
        x = randn(8, 64)
        module.zero_grad()
        loss(x).backward()
        expected = [p.grad for p in module.parameters()]
        module.zero_grad()
        model(x).backward()
        for parameter, grad in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, msg=f"call {call}")
    _expect_refusals("hidden_add", 2)  # forward and backward
