"""Known surprises (docs/footguns.md) that no other test shows."""

from __future__ import annotations

import io
import threading

import torch
from torch import nn
from torch.library import custom_op

from .support import captured, compiled, randn, refusals

_host_calls = 0
_errors: list[str] = []


@custom_op("pygraph_test::counts_its_calls", mutates_args=())
def counts_its_calls(x: torch.Tensor) -> torch.Tensor:
    global _host_calls
    _host_calls += 1
    return x + 1


@custom_op("pygraph_test::draws_elsewhere", mutates_args=())
def draws_elsewhere(x: torch.Tensor) -> torch.Tensor:
    """While it is captured, another thread draws from the default generator."""

    def draw() -> None:
        try:
            torch.rand(8, device="cuda")
        except RuntimeError as error:
            _errors.append(str(error))

    if torch.cuda.is_current_stream_capturing():
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    return x + 1


for _op in (counts_its_calls, draws_elsewhere):
    _op.register_fake(lambda x: torch.empty_like(x))


def test_code_on_the_host_inside_of_an_operator_runs_at_capture_and_never_again() -> None:
    model = compiled(lambda x: counts_its_calls(x) * 2)
    x = randn(8)
    with torch.no_grad():
        for _ in range(5):
            model(x)
        assert len(captured()) == 1
        before = _host_calls
        for _ in range(5):
            torch.testing.assert_close(model(x), (x + 1) * 2)
    assert _host_calls == before


def test_a_graph_of_the_programs_own_that_is_captured_meanwhile_keeps_its_random_numbers() -> None:
    """Before PyTorch 2.15 all captures share the default generator's state: a recording is left to a
    later call then."""
    model = compiled(lambda x: x.exp() * 2)
    x = randn(256, 256)
    has_drawn, may_go_on = threading.Event(), threading.Event()
    graph, drawn = torch.cuda.CUDAGraph(), []
    errors: list[BaseException] = []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                drawn.append(torch.rand(1000, device="cuda"))
                has_drawn.set()
                may_go_on.wait(60)
                drawn.append(torch.rand(1000, device="cuda"))
        except BaseException as error:
            errors.append(error)
            has_drawn.set()

    with torch.no_grad():
        model(x)
        thread = threading.Thread(target=capture)
        thread.start()
        try:
            has_drawn.wait(60)
            for _ in range(3):
                torch.testing.assert_close(model(x), x.exp() * 2)
        finally:
            may_go_on.set()
            thread.join()
        assert errors == [] and refusals() == []
        torch.manual_seed(1)
        expected = [torch.rand(1000, device="cuda") for _ in range(2)]
        torch.manual_seed(1)
        graph.replay()
        assert all(map(torch.equal, drawn, expected))
        for _ in range(3):
            model(x)
    assert len(captured()) == 1


def test_a_thread_that_draws_during_a_recording_gets_pytorchs_error() -> None:
    _errors.clear()
    model = compiled(lambda x: draws_elsewhere(x) * 2)
    x = randn(8)
    torch.rand(8, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(model(x), (x + 1) * 2)
    # From 2.15 on at the latest, other threads may draw (each capture has a state of its own).
    assert _errors or torch.__version__ >= (2, 12)
    assert all("outside graph capture" in error for error in _errors)
    torch.rand(8, device="cuda")  # later draws are ordinary


def test_small_gradients_share_a_storage_that_is_saved_whole() -> None:
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).cuda()
    model = compiled(module)
    for _ in range(4):
        module.zero_grad()
        model(randn(8, 64)).sum().backward()
    assert refusals() == []
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    storages = {g.untyped_storage().data_ptr() for g in gradients}
    assert len(storages) < len(gradients)

    def saved_bytes(gradient: torch.Tensor) -> int:
        file = io.BytesIO()
        torch.save(gradient, file)
        return file.getbuffer().nbytes

    smallest = min(gradients, key=lambda g: g.numel())
    assert saved_bytes(smallest) > 4 * saved_bytes(smallest.clone())
