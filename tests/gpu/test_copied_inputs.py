"""Functions that cannot be relocated are captured on copies of their inputs, at fixed addresses."""

from __future__ import annotations

import ctypes
import glob
import os
import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.library import custom_op

import pygraph
from benchmarks.hidden_address import add_hidden, address_in, hidden_add, hide

from .support import assert_same, captured, compiled, randn, refusals, uncaptured

# Watched, relocated, looked at closer, and on copies: from here on a call replays.
_CALLS_UNTIL_CAPTURED = 4


@triton.jit
def _add_in_place(table, x, count, block: tl.constexpr):  # noqa: ANN001, ANN202
    index = tl.program_id(0) * block + tl.arange(0, block)
    state = address_in(table).to(tl.pointer_type(tl.float32))
    total = tl.load(state + index, mask=index < count) + tl.load(x + index, mask=index < count)
    tl.store(state + index, total, mask=index < count)


@custom_op("pygraph_test::hidden_add_in_place", mutates_args={"state"})
def hidden_add_in_place(state: torch.Tensor, x: torch.Tensor) -> None:
    _add_in_place[(triton.cdiv(x.numel(), 128),)](hide(state), x, x.numel(), 128)


@custom_op("pygraph_test::hidden_and_other", mutates_args=())
def hidden_and_other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As hidden_add, but a graph of it does something else."""
    out = add_hidden(x, y)
    return out + 1 if torch.cuda.is_current_stream_capturing() else out + 0


@custom_op("pygraph_test::copy_of_rows", mutates_args=())
def copy_of_rows(x: torch.Tensor) -> torch.Tensor:
    """A copy, made by one call of the CUDA runtime for all rows."""
    out = torch.empty_like(x)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    row = x.shape[1] * x.element_size()
    to, source = out.data_ptr(), x.data_ptr()
    for start in (0, row):  # even rows, odd rows
        copied = _cudart().cudaMemcpy2DAsync(
            *(ctypes.c_void_p(to + start), ctypes.c_size_t(2 * row)),
            *(ctypes.c_void_p(source + start), ctypes.c_size_t(2 * row)),
            *(ctypes.c_size_t(row), ctypes.c_size_t(x.shape[0] // 2), 3, stream),
        )
        assert copied == 0
    return out


hidden_and_other.register_fake(lambda x, y: torch.empty_like(x))
copy_of_rows.register_fake(lambda x: torch.empty_like(x))
hidden_add.register_autograd(lambda ctx, grad: (hidden_add(grad * 0.5, grad * 0.5), grad))


def _cudart() -> ctypes.CDLL:
    folder = os.path.dirname(torch.__file__)
    found = glob.glob(os.path.join(folder, "..", "nvidia", "**", "libcudart.so*"), recursive=True)
    return ctypes.CDLL(found[0] if found else "libcudart.so")


def _check(function: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[pygraph.GraphStats]:
    """Compares captured calls with uncaptured ones, at the end; the graphs."""
    model = compiled(function)
    with uncaptured():
        torch.manual_seed(1)
        expected = [model(*args) for args in inputs]
    for _ in range(_CALLS_UNTIL_CAPTURED):
        model(*inputs[0])
    rows = captured()
    assert rows, pygraph.stats()
    torch.manual_seed(1)
    assert_same([model(*args) for args in inputs], expected)
    for row in rows:
        assert row.bytes_copied > 0 and row.fixed_bytes >= row.bytes_copied
        assert row.bytes_not_copied == 0
    return captured()


@torch.no_grad()
def test_an_address_hidden_in_device_memory() -> None:
    inputs = [(randn(256),) for _ in range(4)]
    (row,) = _check(lambda x: torch.relu(hidden_add(x * 2, x)) + 1, inputs)
    assert row.replays >= 4 and "verification failed" in row.reason
    assert row.bytes_copied == 2 * 1024  # x in, the result out
    assert refusals() == []


@torch.no_grad()
def test_results_that_share_memory_and_views_of_inputs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = hidden_add(x, x).view(16, 16)
        return y, y.t(), y[2:4], x.view(16, 16)[1], x

    inputs = [(randn(256),) for _ in range(4)]
    _check(function, inputs)


@torch.no_grad()
def test_inputs_of_other_layouts() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return hidden_add((x + y).contiguous(), x * z)

    inputs = [
        (randn(64, 32).t(), randn(1, 64).expand(32, 64), randn(70, 65)[2:34, :64]) for _ in range(4)
    ]
    _check(function, inputs)


@torch.no_grad()
def test_random_numbers() -> None:
    inputs = [(randn(256),) for _ in range(4)]
    _check(lambda x: torch.nn.functional.dropout(hidden_add(x, x), 0.5), inputs)


@torch.no_grad()
def test_a_copy_of_several_rows() -> None:
    (row,) = _check(lambda x: copy_of_rows(x * 2) + 1, [(randn(64, 32),) for _ in range(4)])
    assert "more than one row" in row.reason


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(randn(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden_add(x, self.bias)) * 3


@torch.no_grad()
def test_parameters_are_not_copied_and_may_move() -> None:
    module = Biased()
    model = compiled(module)

    def check(calls: int) -> None:
        for _ in range(calls):
            x = randn(256)
            torch.testing.assert_close(model(x), torch.relu(x + module.bias) * 3)

    check(_CALLS_UNTIL_CAPTURED)
    (row,) = captured()
    assert row.bytes_copied == 2 * 1024
    module.bias.mul_(2)
    check(2)
    assert captured()[0].replays == row.replays + 2
    replays = 0
    for moved in range(1, 6):
        kept = module.bias.data
        module.bias.data = randn(256)
        assert module.bias.data_ptr() != kept.data_ptr()
        check(4)
        (row,) = captured()
        assert row.bytes_copied == (2 if moved < 3 else 3) * 1024, moved
        if moved > 3:  # where everything is copied, nothing is recorded anew
            assert row.replays == replays + 4
        replays = row.replays


class Accumulator(torch.nn.Module):
    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(256, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden_add_in_place(self.state, x)
        return self.state * 2


@torch.no_grad()
def test_an_input_that_is_written() -> None:
    module = Accumulator()
    model = compiled(module)
    expected = torch.zeros(256, device="cuda")
    for _ in range(_CALLS_UNTIL_CAPTURED + 4):
        x = randn(256)
        expected += x
        torch.testing.assert_close(model(x), expected * 2)
        torch.testing.assert_close(module.state, expected)
    (row,) = captured()
    assert row.replays >= 4 and row.bytes_copied == 4 * 1024  # x, the state in and out, the result


def test_training() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = module[0](x)
        return module[1](hidden_add(y, y.detach())).square().mean()

    model = compiled(loss)
    for call in range(_CALLS_UNTIL_CAPTURED + 4):
        x = randn(8, 64)
        module.zero_grad()
        loss(x).backward()
        expected = [p.grad for p in module.parameters()]
        module.zero_grad()
        model(x).backward()
        for parameter, grad in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, msg=f"call {call}")
    rows = captured()
    assert {row.name for row in rows} == {"forward", "backward"}, pygraph.stats()
    assert all(row.bytes_copied > 0 and row.replays > 0 for row in rows), rows


@torch.no_grad()
def test_what_copies_do_not_help_stays_uncaptured() -> None:
    model = compiled(lambda x: hidden_and_other(x, x))
    for _ in range(_CALLS_UNTIL_CAPTURED + 4):
        x = randn(256)
        torch.testing.assert_close(model(x), 2 * x)
    assert captured() == []
    (reason,) = refusals()
    assert reason.count("verification failed") == 2 and "with copied inputs" in reason


@torch.no_grad()
def test_reset_gives_the_memory_back() -> None:
    model = compiled(lambda x: hidden_add(x, x * 2))
    x = randn(16 << 20)
    for _ in range(_CALLS_UNTIL_CAPTURED + 1):
        model(x)
    (row,) = captured()
    assert row.fixed_bytes >= 3 * x.nbytes
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    pygraph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= row.fixed_bytes
    torch.testing.assert_close(model(x), x * 3)


@torch.no_grad()
def test_threads_and_streams_share_a_graph() -> None:
    model = compiled(lambda x: hidden_add(x, x * 2))
    for _ in range(_CALLS_UNTIL_CAPTURED):
        model(randn(1 << 20))
    wrong: list[int] = []

    def run(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for call in range(50):
                x = torch.full((1 << 20,), float(100 * thread + call), device="cuda")
                result = model(x)
                if not torch.equal(result, x * 3):
                    wrong.append(call)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and captured()[0].replays > 50


@torch.no_grad()
def test_a_trial_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PYGRAPH_SELECT", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = hidden_add(x, x * 0.5)
        return x

    model = compiled(many)
    x = randn(256)
    for _ in range(_CALLS_UNTIL_CAPTURED + 30):
        torch.testing.assert_close(model(x), many(x))
    (row,) = captured()
    assert row.timings["replayed"].period < row.timings["uncaptured"].period
    assert row.timings["replayed"].memory >= row.fixed_bytes > 0


@torch.no_grad()
def test_explain_says_what_is_copied() -> None:
    report = pygraph.explain(lambda x: hidden_add(x, x * 2), randn(256))
    (row,) = report.graphs
    assert row.bytes_copied == 2048
    (cut,) = [cut for cut in report.cuts if cut.kind == "copies"]
    assert cut.reason.startswith("inference copies 2.0 KiB per call: verification failed")
