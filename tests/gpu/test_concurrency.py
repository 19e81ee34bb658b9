"""Streams and threads."""

from __future__ import annotations

import threading

import torch

from .support import captured, compiled, randn


def test_two_streams() -> None:
    model = compiled(lambda x: torch.relu(x @ x) @ x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [randn(512, 512) * 0.05 for _ in range(40)]
    expected = [torch.relu(x @ x) @ x for x in inputs]
    with torch.no_grad():
        for x in inputs[:3]:
            model(x)
        torch.cuda.synchronize()
        results = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                results.append(model(x))
        torch.cuda.synchronize()
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-2, rtol=1e-2)
    assert captured()[0].replays >= 38  # the first call on each of the streams runs uncaptured


def test_four_threads_call_one_model() -> None:
    model = compiled(lambda x: torch.tanh(x @ x) + x)
    x = randn(64, 64)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for call in range(1000):
                mine = torch.randn(64, 64, device="cuda", generator=generator)
                result = model(mine)
                if call % 100 == 0:
                    reference = torch.tanh(mine @ mine) + mine
                    if not torch.allclose(result, reference, atol=1e-3):
                        failures.append(f"thread {seed}, call {call}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(row.replays for row in captured()) >= 3000


def test_a_thread_that_never_saw_the_model_records_it() -> None:
    model = compiled(lambda x: torch.sin(x) * 2)

    def work() -> None:
        with torch.no_grad():
            for _ in range(4):
                model(randn(32))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(captured()) == 1
