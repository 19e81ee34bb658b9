"""What a function may write is known, also where its first calls change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from .support import captured, compiled


@triton.jit
def _double_if(flag, x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < n) & (tl.load(flag) > 0)
    tl.store(x + i, tl.load(x + i, mask=mask) * 2, mask=mask)


def _by_triton(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    _double_if[(1,)](s, x, x.numel(), BLOCK=64)
    return x + 1


@torch.library.custom_op("pygraph_written::declared", mutates_args=("x",))
def _declared(x: torch.Tensor, s: torch.Tensor) -> None:
    x.mul_(s)


@torch.library.custom_op("pygraph_written::undeclared", mutates_args=())
def _undeclared(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    x.mul_(s)
    return x + 1


@_undeclared.register_fake
def _(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _by_declared(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    _declared(x, s)
    return x + 1


def _scaled(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x.mul_(s)


def _masked(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    x.masked_fill_(s > 1, 7.0)
    return x * 2


def _foreach(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([x], s)
    return x + 1


def _index_put(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    x.index_put_((torch.where(s > 1, 1, 0).reshape(1),), x[0] * s, accumulate=True)
    return x + 1


@pytest.mark.parametrize(
    "function",
    [_by_triton, _by_declared, _undeclared, _scaled, _masked, _foreach, _index_put],
    ids=lambda f: getattr(f, "__name__", "undeclared"),
)
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_write_that_begins_late_is_made_once_per_call(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], start: float
) -> None:
    """The first calls write what is there, or nothing; the one that is recorded writes."""
    model = compiled(lambda x, s: function(x, s))
    x = torch.full((64,), start, device="cuda")
    expected = x.clone()
    with torch.no_grad():
        for call in range(8):
            neutral = 0.0 if function is _by_triton else 1.0
            s = torch.tensor(neutral if call == 0 else 2.0, device="cuda")
            if call == 1:  # warmed up with zeros, or with a scale of one
                x.add_(1)
                expected.add_(1)
            result, reference = model(x, s), function(expected, s)
            torch.testing.assert_close(x, expected, rtol=0, atol=0)
            torch.testing.assert_close(result, reference, rtol=0, atol=0)


def test_a_part_that_reuses_the_memory_of_an_earlier_one() -> None:
    def function(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) + 1
        with torch.autograd.profiler.record_function("cut"):
            y = y + y.sum().item() * 0
        return (y * s).sin() * s

    model = compiled(function)
    with torch.no_grad():
        for call in range(8):
            x = torch.full((256,), float(call > 0), device="cuda")
            s = torch.tensor(1.0 if call == 0 else 2.0, device="cuda")
            torch.testing.assert_close(model(x, s), function(x, s))


def test_a_backward_that_overwrites_what_was_saved() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)
    ).cuda()
    model = compiled(layers)
    for call in range(8):
        x = torch.randn(512, 512, device="cuda") * float(call > 0)
        layers.zero_grad()
        layers(x).square().sum().backward()
        expected = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        layers.zero_grad()
        model(x).square().sum().backward()
        found = [p.grad for p in layers.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_written_result_is_captured() -> None:
    model = compiled(_scaled)
    x, s = torch.zeros(64, device="cuda"), torch.tensor(1.0, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            model(x, s)
    assert captured()[0].replays > 0
