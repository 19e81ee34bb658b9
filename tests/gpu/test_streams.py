"""Replays on several streams: nothing waits for another stream, and all results are right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

import pygraph
from pygraph import runtime

from .support import assert_same, captured, compiled, randn, uncaptured, watchdog

_SECOND = 2_000_000_000  # clock cycles of torch.cuda._sleep, about


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _create_stream() -> int:
    handle = ctypes.c_void_p()
    torch.cuda.current_stream()
    assert _driver().cuStreamCreate(ctypes.byref(handle), 1) == 0
    assert handle.value is not None
    return handle.value


def _destroy_stream(handle: int) -> None:
    assert _driver().cuStreamDestroy_v2(ctypes.c_void_p(handle)) == 0


def _program(x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x @ x) @ x).cumsum(0).cumsum(1).sum(0)  # with internal memory


def _warm() -> Callable[[torch.Tensor], torch.Tensor]:
    model = compiled(_program)
    with torch.no_grad():
        for _ in range(4):
            model(randn(256, 256))
    assert len(captured()) == 1
    return model  # type: ignore[no-any-return]


def test_streams_that_the_program_destroys() -> None:
    model = _warm()
    x = randn(256, 256) * 0.05
    torch.cuda.synchronize()
    expected = model(x)
    torch.cuda.synchronize()
    for _ in range(40):
        handle = _create_stream()
        stream = torch.cuda.ExternalStream(handle)
        with torch.no_grad(), torch.cuda.stream(stream):
            results = [model(x) for _ in range(4)]
        stream.synchronize()
        for result in results:
            assert torch.equal(result, expected)
        del results
        _destroy_stream(handle)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    pygraph.reset()
    torch.cuda.synchronize()


@pytest.mark.parametrize("begins_there", [False, True])
def test_a_training_step_on_a_stream_of_the_programs_own(begins_there: bool) -> None:
    """Its backward's graph leaves the memory of what was saved alone: nothing may wait for a stream
    that the program may destroy."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh()) for _ in range(4))
    ).cuda()
    model = compiled(module, options={"pygraph.select": "always"})
    inputs = [randn(1024, 1024) for _ in range(3)]

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        module.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    with uncaptured():
        expected = [step(x) for x in inputs]
    handle = _create_stream()
    for i in range(0 if begins_there else 6):
        assert_same(step(inputs[i % 3]), expected[i % 3])
    torch.cuda.synchronize()
    stream = torch.cuda.ExternalStream(handle)
    with torch.cuda.stream(stream):
        for i in range(30):
            assert_same(step(inputs[i % 3]), expected[i % 3])
    stream.synchronize()
    (row,) = [row for row in pygraph.stats() if row.name.startswith("backward")]
    assert (row.state, row.reason) == ("captured", "")
    (graph,) = [
        entry.graph
        for partition in list(runtime.partitions)
        if partition.info.is_backward
        for entry in partition.entries.values()
    ]
    assert graph is not None and not graph.donated and graph.replays > 10
    pygraph.reset()
    torch.cuda.synchronize()
    _destroy_stream(handle)


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_a_stream_does_not_wait_for_what_is_queued_on_another(calls: int) -> None:
    """A waits for an event that B records after its calls: a wait of B for A would never end."""
    model = _warm()
    x = randn(256, 256) * 0.05
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), watchdog(60):
        for stream in (a, b):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    model(x)
        torch.cuda.synchronize()
        done_b = torch.cuda.Event()
        with torch.cuda.stream(a):
            torch.cuda._sleep(3 * _SECOND)
            for _ in range(calls):
                model(x)
        with torch.cuda.stream(b):
            for _ in range(calls):
                result = model(x)
            done_b.record()
        done_b.synchronize()
        assert not a.query(), "B has waited for what A is doing"
        torch.cuda.synchronize()
    assert torch.equal(result, model(x))


@pytest.mark.parametrize("count", [2, 7, 20])
def test_streams_replay_the_same_graph_at_a_time(count: int) -> None:
    model = _warm()
    streams = [torch.cuda.Stream() for _ in range(count)]
    inputs = [randn(256, 256) * 0.05 for _ in range(200)]
    results = []
    with torch.no_grad():
        expected = [_program(x) for x in inputs]
        torch.cuda.synchronize()
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % count]):
                results.append(model(x))
        torch.cuda.synchronize()
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-2, rtol=1e-2)
    row = captured()[0]
    assert row.replays + row.calls_elsewhere >= 200
    if count < 8:  # with the one that it was warmed up on
        assert row.calls_elsewhere <= count


def test_random_numbers_on_two_streams() -> None:
    model = compiled(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(1 << 16, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        for _ in range(4):
            model(x)
        for stream in streams * 2:
            with torch.cuda.stream(stream):
                model(x)
        torch.cuda.synchronize()
        results = []
        for i in range(40):
            with torch.cuda.stream(streams[i % 2]):
                results.append(model(x))
        pygraph.reset()  # what pending replays read is not given to others
        others = [torch.full((4,), 1 << 40, device="cuda") for _ in range(1000)]
        torch.cuda.synchronize()
    assert len(others) == 1000
    for i, result in enumerate(results):
        assert 0.45 < (result > 0).float().mean() < 0.55
        assert all(not torch.equal(result, other) for other in results[:i])


def test_training_on_a_side_stream_that_others_follow() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)
    ).cuda()
    step = compiled(lambda x: model(x).square().mean())
    x = randn(4096, 256)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        step(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for _ in range(4):
        expected = gradients()
    for _ in range(3):
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results = [gradients() for _ in range(3)]
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            for found in results:
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b)


def test_memory_that_a_side_stream_reads_is_not_taken_over() -> None:
    side = torch.cuda.Stream()
    seen: list[torch.Tensor] = []
    size = (1 << 20,)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == size:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(_SECOND // 20)
                seen.append(tensor.clone())
            tensor.record_stream(side)
        return tensor

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().exp().tanh() * x.cos()).square()

    model = compiled(function)
    x = randn(*size, requires_grad=True)
    references: list[torch.Tensor] = []
    for _ in range(8):
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(x)
        y.sum().backward()
        del y
        others = [torch.zeros(size, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        first = [tensor.clone() for tensor in seen]
        assert all(tensor.isfinite().all() for tensor in first) and len(others) == 4
        if references:
            for tensor, reference in zip(first, references, strict=True):
                assert torch.equal(tensor, reference)
        references = first


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_record_stream_itself_works_as_ever(context: Callable[[], torch.no_grad]) -> None:
    stream = torch.cuda.Stream()
    with context():
        x = randn(1 << 20)
        (x + 1).clone()  # a kernel that is loaded later would wait for the one that sleeps
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2 * _SECOND)
            y = x + 1
        x.record_stream(stream)
        expected = x.clone()
        address = x.data_ptr()
        del x
        other = torch.empty(1 << 20, device="cuda")
        assert other.data_ptr() != address
        other.fill_(7)
        torch.cuda.synchronize()
        assert torch.equal(y, expected + 1)


@pytest.mark.parametrize("lanes", [1, 8])
def test_launches_that_wait_keep_their_addresses(lanes: int) -> None:
    """Each replay gets other addresses while those before it still wait behind a long kernel. cuBLAS's
    second kernel overlaps its first one here, and the division follows in place."""

    def program(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.rms_norm(b.cos(), b.shape), a @ a.t() / 8

    model = compiled(program, options={"pygraph.lanes": lanes})
    with torch.no_grad():
        for _ in range(4):
            model(randn(1, 1), randn(33))
        assert len(captured()) == 1
        for _ in range(20):
            inputs = [(randn(1, 1), randn(33)) for _ in range(10)]
            with runtime.uncaptured():
                expected = [model(*pair) for pair in inputs]
            torch.cuda.synchronize()
            torch.cuda._sleep(_SECOND // 100)
            results = [model(*pair) for pair in inputs]
            for result, wanted in zip(results, expected, strict=True):
                assert torch.equal(result[1], wanted[1])
                torch.testing.assert_close(result[0], wanted[0])
