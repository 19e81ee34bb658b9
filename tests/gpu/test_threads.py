"""Threads: small stacks, libraries' handles, the program's memory pools, Python's lock."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import PartitionInfo
from pygraph.undoing import Undo, undoing

from .support import assert_same, captured, compiled, randn, refusals, watchdog


def _in_thread(work: Callable[[], None], stack: int = 0) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(stack)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kib", [512, 1024])
def test_a_recording_in_a_thread_with_a_small_stack(kib: int) -> None:
    model = compiled(lambda x: torch.relu(x @ x) + 1)
    x = randn(64, 64)
    with torch.no_grad():
        expected = model(x)  # the compiler itself needs more

    def work() -> None:
        with torch.no_grad():
            for _ in range(4):
                assert_same(model(x), expected)

    _in_thread(work, kib << 10)
    assert len(captured()) == 1


@pytest.mark.parametrize("kind", ["product", "convolution", "solver"])
def test_a_recording_in_a_thread_without_handles(kind: str) -> None:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "product": lambda x: torch.relu(x @ x) @ x,
        "convolution": lambda x: torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3]),
        "solver": lambda x: torch.linalg.qr(x)[1] @ x,
    }
    model = compiled(functions[kind])
    x = randn(64, 64)
    with torch.no_grad():
        expected = model(x)

        def work() -> None:
            with torch.no_grad():
                for _ in range(4):
                    torch.testing.assert_close(model(x), expected, atol=1e-2, rtol=1e-2)

        for _ in range(5):
            _in_thread(work)
        torch.testing.assert_close(model(x), expected, atol=1e-2, rtol=1e-2)
    if kind != "solver":
        assert len(captured()) == 1 and refusals() == []


def test_programs_that_draw_are_recorded_beside_each_other() -> None:
    """PyTorch lets nobody draw from the default generator while another thread captures."""
    dropout = torch.nn.functional.dropout
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: dropout(x.exp(), 0.1) * 2,
        lambda x: dropout(x.sin(), 0.2) * 2,
        lambda x: dropout(x.cos(), 0.3) * 2,
        lambda x: x.tanh() * 2,
    ]
    models = [compiled(function, dynamic=False) for function in functions]
    sizes = range(16, 16 * 5, 16)
    errors: list[BaseException] = []

    def run(model: Callable[[torch.Tensor], torch.Tensor], rounds: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(rounds):
                    for size in sizes:
                        model(torch.ones(size, 64, device="cuda"))
        except BaseException as error:
            errors.append(error)

    for model in models:  # Dynamo compiles in one thread
        _in_thread(lambda model=model: run(model, 1))
    # One thread records at a time; the others' calls run uncaptured meanwhile.
    end = time.monotonic() + 60
    while len(captured()) < len(models) * len(sizes) and not errors and time.monotonic() < end:
        threads = [threading.Thread(target=run, args=(model, 6)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == [] and len(captured()) == len(models) * len(sizes), pygraph.stats()


def test_a_thread_that_draws_for_long_gets_no_error_from_a_recording() -> None:
    """Such as a first call, which loads and tunes kernels. The recording is left to a later call."""
    begun, may_end = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def draw_on(undo: Undo) -> None:
        runtime.begin_drawing(undo)
        while not may_end.wait(0.001):
            torch.rand(16, device="cuda")
            begun.set()

    def draw() -> None:
        try:
            undoing(draw_on)
        except BaseException as error:
            errors.append(error)

    model = compiled(lambda x: x.exp() * 2)
    x = randn(256, 256)
    model(x)
    thread = threading.Thread(target=draw)
    thread.start()
    begun.wait()
    for _ in range(2):
        torch.testing.assert_close(model(x), x.exp() * 2)
    assert captured() == [] and refusals() == []
    may_end.set()
    thread.join()
    for _ in range(2):
        torch.testing.assert_close(model(x), x.exp() * 2)
    assert errors == [] and len(captured()) == 1


def _attend(x: torch.Tensor) -> torch.Tensor:
    q = x.half().view(1, 4, 64, 64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q) * 2


@pytest.mark.parametrize("kind", ["product", "convolution", "attention", "fft", "recurrent"])
def test_a_graph_outlives_the_thread_that_recorded_it(kind: str) -> None:
    """What libraries keep for a thread, plans and handles, may go with it."""
    lstm = torch.nn.LSTM(64, 64).cuda().eval()
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "product": lambda x: torch.nn.functional.gelu(x @ x + x[0]) @ x,
        "convolution": lambda x: torch.nn.functional.conv2d(
            x.view(4, 16, 16, 16), x.view(64, 16, 4, 4), padding=1
        ).relu(),
        "attention": _attend,
        "fft": lambda x: torch.fft.fft(x).abs() + 1,
        "recurrent": lambda x: lstm(x.view(8, 32, 64))[0] * 2,
    }
    model = compiled(functions[kind])
    x = randn(256, 64) if kind != "product" else randn(64, 64)

    def work() -> None:
        with torch.no_grad():
            for _ in range(4):
                model(x)

    _in_thread(work)
    graphs = len(captured())
    gc.collect()
    with torch.no_grad():
        for size in range(1, 30):  # others take what may have been freed
            torch.nn.functional.conv2d(randn(2, size, 30, 30), randn(8, size, 3, 3))
            torch.fft.fft(randn(8, 101 * size))
        for _ in range(4):
            y = torch.randn_like(x)
            with runtime.uncaptured():
                expected = model(y)
            torch.testing.assert_close(model(y), expected, atol=1e-3, rtol=1e-3)
    if kind in ("product", "convolution", "fft"):
        assert graphs == 1 and sum(row.replays for row in captured()) >= 4, pygraph.stats()


def test_sixteen_threads_share_a_model_and_record_its_shapes() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
    ).cuda()
    model = compiled(layers, dynamic=False)
    sizes = [8, 16, 24, 32]
    failures: list[str] = []

    def work(index: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for call in range(100):
                x = torch.full((sizes[(index + call) % 4], 64), index + 1.0, device="cuda")
                if not torch.allclose(model(x), layers(x), atol=1e-2):
                    failures.append(f"thread {index}, call {call}")

    def compile_all() -> None:  # in a thread: Dynamo's guards look at its number of threads
        with torch.no_grad():
            for size in sizes:
                model(randn(size, 64))

    _in_thread(compile_all)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    # Dynamo may have compiled it for more than one number of threads.
    assert len(captured()) >= len(sizes) and refusals() == []


def test_calls_within_a_pool_of_the_programs() -> None:
    model = compiled(lambda x: torch.relu(x @ x) + 1)
    x = randn(256, 256)
    pool = torch.cuda.MemPool()
    with torch.no_grad():
        expected = model(x)
        with torch.cuda.use_mem_pool(pool):
            for _ in range(4):
                assert_same(model(x), expected)
        assert refusals() == []
        for _ in range(3):
            assert_same(model(x), expected)
        assert len(captured()) == 1
        replays = captured()[0].replays
        with torch.cuda.use_mem_pool(pool):
            results = [model(x) for _ in range(4)]
        assert captured()[0].replays == replays + 4
    for result in results:
        assert_same(result, expected)
    del results, result
    pygraph.reset()
    del pool
    assert_same(x, x.clone())


def test_a_recording_while_another_thread_uses_a_pool() -> None:
    model = compiled(lambda x: torch.relu(x @ x) + 1)
    x = randn(256, 256)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            kept = torch.ones(16, device="cuda")
            entered.set()
            leave.wait(120)
            del kept

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(120)
    try:
        with torch.no_grad():
            for _ in range(5):
                torch.testing.assert_close(model(x), torch.relu(x @ x) + 1)
    finally:
        leave.set()
        thread.join()
    assert len(captured()) == 1
    pygraph.reset()


@contextmanager
def _host_callback_pending(seconds: float) -> Iterator[None]:
    """Python code that a stream runs, on a thread of the driver, and that needs Python's lock."""
    import ctypes

    stream = torch.cuda.Stream()
    done = threading.Event()

    def callback(_: object) -> None:
        threading.Event().wait(seconds)
        done.set()

    kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(callback)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), kept, None) == 0
    try:
        yield
    finally:
        stream.synchronize()
        assert done.is_set()


def test_graphs_are_recorded_and_dropped_while_a_host_callback_is_pending() -> None:
    x = randn(256, 256)
    with torch.no_grad(), watchdog(120):
        for index in range(6):
            torch._dynamo.reset()
            model = compiled(lambda x, index=index: torch.relu(x @ x).cumsum(0) + index)
            model(x)
            with _host_callback_pending(0.3):
                for _ in range(4):
                    result = model(x)
            with _host_callback_pending(0.3):
                pygraph.reset()
            torch.testing.assert_close(result, torch.relu(x @ x).cumsum(0) + index)


def test_a_recording_beside_ffts_whose_plans_are_dropped_while_a_host_callback_is_pending() -> None:
    """Who drops a plan may wait for the GPU, and the recording waits for who drops it."""
    x = randn(256, 256)
    begun = threading.Event()

    def drop() -> None:
        begun.set()
        torch.backends.cuda.cufft_plan_cache.clear()

    with torch.no_grad(), watchdog(120):
        for index in range(6):
            torch.fft.fft(x)
            begun.clear()
            model = compiled(lambda x, index=index: torch.relu(x @ x) + index)
            model(x)
            with _host_callback_pending(0.3):
                thread = threading.Thread(target=drop)
                thread.start()
                begun.wait()
                result = model(x)
            thread.join()
            torch.testing.assert_close(result, torch.relu(x @ x) + index)


def test_pythons_lock_is_free_while_a_recording_waits_for_the_gpu() -> None:
    model = compiled(lambda x: torch.relu(x @ x) + 1)
    x = randn(256, 256)
    ticks = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    with torch.no_grad(), watchdog(120):
        model(x)
        torch.cuda.synchronize()
        thread = threading.Thread(target=tick)
        torch.cuda._sleep(2_000_000_000)  # about a second, which verification waits for
        thread.start()
        model(x)
        stop.set()
        thread.join()
    assert ticks[0] > 100


def test_bounds_that_lie_beside_garbage_in_a_kernels_parameters() -> None:
    """The upper bound of clamp is half a word. The other half is padding, in new threads often the
    upper half of a pointer, beside which 9.0 looks like an address."""

    def function(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (x,) = args
        args.clear()
        return (x.clamp(-9, 9) * (x + 1).clamp(-2, 2), (x.abs() / 3).sort(-1).values.clamp(-9, 9))

    nothing = frozenset[int]()
    info = PartitionInfo("test", "inference", 0, 1, True, nothing, nothing, (), nothing)
    large = torch.linspace(-50, 50, 64, device="cuda")
    small = large / 100
    expected = function([large.clone()])
    keep = [torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(8)]
    graphs = 0
    for _ in range(30):
        partition = Partition(function, info, Options(select="always"))

        def work(partition: Partition = partition) -> None:
            for _ in range(4):
                partition.callable([small.clone()])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        graphs += len(captured())
        # The word may be the address of memory in use, whose life nobody knows.
        assert all("memory that is no argument of its own" in reason for reason in refusals())
        for result, value in zip(partition.callable([large.clone()]), expected, strict=True):
            assert torch.equal(result, value)
    assert graphs > 0, pygraph.stats()
    del keep
