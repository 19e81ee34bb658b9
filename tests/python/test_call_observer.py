"""What a call reads, writes and makes; state as memory of its own; memory that is exchanged."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pygraph import runtime

_CPU = torch.device("cpu")


def observe(call: Callable[[], Any]) -> tuple[Any, Any]:
    with torch.autograd.set_multithreading_enabled(False):
        observer = runtime.engine().CallObserver(lambda name: None)
        try:
            return call(), observer
        finally:
            observer.end()


def state_of(observer: Any, *excluded: torch.Tensor) -> Any:
    return runtime.engine().State(observer, [], list(excluded), _CPU)


def addresses(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_state_is_what_was_not_made_in_the_call() -> None:
    x, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
    _, observer = observe(lambda: torch.relu(torch.nn.functional.linear(x, weight, bias) * 2 + 1))
    assert addresses(state_of(observer).tensors()) == addresses([x, weight, bias])
    assert addresses(state_of(observer, x).tensors()) == addresses([weight, bias])


def test_a_training_step_uses_its_parameters_statistics_and_moments_and_nothing_else() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 1, 0])

    def step() -> None:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    _, observer = observe(step)
    moments = [value for of in optimizer.state.values() for value in of.values()]
    expected = [*model.state_dict().values(), *moments]
    assert addresses(state_of(observer, x, y).tensors()) == addresses(expected)
    assert len(observer.backward_nodes) > 0
    assert observer.makers_of_survivors([], _CPU) == []


def test_what_outlives_a_call_is_named_by_its_operator() -> None:
    kept: list[torch.Tensor] = []
    result, observer = observe(lambda: kept.append(torch.ones(3).exp()) or torch.ones(3) + 1)  # type: ignore[func-returns-value]
    assert observer.makers_of_survivors([result], _CPU) == ["aten::exp"]
    kept.clear()
    gc.collect()
    assert observer.makers_of_survivors([result], _CPU) == []


def test_memory_of_no_operator_is_born_in_the_call() -> None:
    """As compiled code makes tensors."""
    from torch._C._dynamo.guards import _empty_strided_cpu

    _, observer = observe(lambda: _empty_strided_cpu((4,), (1,), torch.float32).add_(1))
    assert state_of(observer).tensors() == []
    assert state_of(observer).unowned == ""


def test_state_whose_tensors_are_gone_is_said_to_be() -> None:
    x = torch.ones(3)
    holders = [x.clone()]

    def call() -> torch.Tensor:
        return x + holders.pop()

    _, observer = observe(call)
    assert state_of(observer).unowned == "aten::add"


def test_an_operator_on_the_cpu_waits_for_nothing() -> None:
    names: list[str] = []
    observer = runtime.engine().CallObserver(names.append)
    torch.ones(1).item()
    observer.end()
    assert names == []


def test_a_thread_is_observed_once_at_a_time() -> None:
    observer = runtime.engine().CallObserver(lambda name: None)
    with pytest.raises(RuntimeError, match="observed already"):
        runtime.engine().CallObserver(lambda name: None)
    observer.end()
    runtime.engine().CallObserver(lambda name: None).end()


def test_tensors_whose_memory_is_not_known_are_told() -> None:
    sparse = torch.eye(3).to_sparse()
    _, observer = observe(lambda: sparse @ torch.ones(3, 2))
    assert observer.unknown != ""


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_compiler_traces_has_no_memory(dynamic: bool) -> None:
    """A size may be a symbol, and the storage of such a tensor does not tell how large it is."""
    x = torch.ones(5, 4)

    def trace() -> None:
        shapes = ShapeEnv()
        with FakeTensorMode(shape_env=shapes) as fake:
            traced = fake.from_tensor(torch.ones(5, 4), static_shapes=not dynamic)
            for _ in range(50):
                traced = torch.nn.functional.linear(traced, traced.new_empty(4, 4)).sin_()

    def call() -> torch.Tensor:
        before = x + 1
        trace()
        return before * x

    result, observer = observe(call)
    assert observer.unknown == ""
    assert addresses(state_of(observer).tensors()) == addresses([x])
    assert observer.makers_of_survivors([result], _CPU) == []


def test_a_model_is_compiled_in_the_call() -> None:
    """For sizes that differ, so that some are symbols: forward and backward."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    x = torch.ones(5, 4)
    _, observer = observe(lambda: compiled(x).sum().backward())
    assert "nbytes" not in observer.unknown
    expected = [x, *model.parameters()]
    assert addresses(expected) <= addresses(state_of(observer).tensors())
    assert state_of(observer).unowned == ""


def test_tensors_on_the_cpu_are_told_and_numbers_are_not() -> None:
    read, written = torch.ones(3), torch.zeros(3)

    def call() -> None:
        written.add_(read * 2.5)

    _, observer = observe(call)
    found = {tensor.data_ptr(): is_written for tensor, _, is_written, _ in observer.host_tensors()}
    assert found == {read.data_ptr(): False, written.data_ptr(): True}


def test_state_is_valid_while_its_tensors_have_their_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    _, observer = observe(lambda: parameter.detach() + 1)
    state = state_of(observer)
    assert state.is_valid
    with torch.no_grad():
        parameter.mul_(2)
    assert state.is_valid
    parameter.data = torch.ones(3)
    assert not state.is_valid


def test_state_is_not_valid_when_its_tensors_are_gone() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    _, observer = observe(lambda: parameters[0].detach() + 1)
    state = state_of(observer)
    assert state.is_valid
    parameters.clear()
    assert not state.is_valid


def test_arguments_that_share_memory_are_found() -> None:
    weight, x = torch.ones(4), torch.ones(8)
    _, observer = observe(lambda: weight + 1)
    state = state_of(observer)
    assert not state.is_shared_by([x, torch.ones(4)])
    assert state.is_shared_by([x[:4], x[3:]])
    assert not state.is_shared_by([x[:4], x[4:]])  # parts of one storage
    assert state.is_shared_by([weight[1:]])


def test_versions_are_counted_of_what_is_written() -> None:
    read, written, other = torch.ones(3), torch.ones(3), torch.ones(3)
    _, observer = observe(lambda: written.add_(read).add_(other))
    state = state_of(observer)
    position = [t.data_ptr() for t in state.tensors()].index(other.data_ptr())
    before = [t._version for t in (read, written, other)]
    state.bump_versions([position])
    after = [t._version for t in (read, written, other)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1, 1]


def test_memory_is_exchanged_and_put_back() -> None:
    own = torch.arange(4.0)
    view, parameter = own[1:3], torch.nn.Parameter(own)
    given = torch.full((4,), 7.0)
    exchange = runtime.engine().StorageExchange([runtime.engine().flat_tensor(own)], [given])
    assert own.tolist() == [7.0] * 4 and view.tolist() == [7.0] * 2
    with torch.no_grad():
        parameter.mul_(2)
    exchange.undo()
    assert given.tolist() == [14.0] * 4 and own.tolist() == [0.0, 1.0, 2.0, 3.0]
    exchange.undo()  # nothing more to do
    assert own.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_nothing_is_exchanged_for_too_little_memory() -> None:
    a, b = torch.ones(4), torch.ones(4)
    with pytest.raises(ValueError, match="too little"):
        runtime.engine().StorageExchange([a, b], [torch.zeros(4), torch.zeros(3)])
    assert a.tolist() == b.tolist() == [1.0] * 4


def test_memory_is_put_back_when_the_exchange_is_dropped() -> None:
    own = torch.ones(2)
    exchange = runtime.engine().StorageExchange([own], [torch.zeros(2)])
    assert own.tolist() == [0.0, 0.0]
    del exchange
    assert own.tolist() == [1.0, 1.0]


def test_a_flat_tensor_covers_a_storage() -> None:
    storage = torch.arange(6, dtype=torch.int32)
    flat = runtime.engine().flat_tensor(storage[2:4].view(2, 1))
    assert torch.equal(flat, storage)


def test_functions_of_autograd_may_be_called() -> None:
    """They ask for the profiler's configuration while operators are observed."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    weight = torch.ones(4, 4, requires_grad=True)
    observer = runtime.engine().CallObserver(lambda name: None)
    try:
        for _ in range(50):
            Twice.apply(torch.ones(3, 4) @ weight)
    finally:
        observer.end()
    assert observer.unknown == ""


def test_a_custom_function_may_have_the_name_of_an_operator() -> None:
    class detach(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return x * 2  # and a kernel, launched without an operator, may use `hidden`

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * 2, None

    x, hidden = torch.ones(3, requires_grad=True), torch.ones(3)
    _, observer = observe(lambda: detach.apply(x, hidden))
    assert addresses(state_of(observer).tensors()) == addresses([x, hidden])


def test_partitions_inside_run_uncaptured_and_nothing_of_theirs_is_seen() -> None:
    """A model that the backend has compiled, inside of a graphed callable: what watches, records or
    replays it would show other operators than the program's."""
    weight = torch.ones(3)
    decided = []

    def miss(args: list[torch.Tensor]) -> list[torch.Tensor]:
        decided.append(True)
        return [args[0] + 2]

    partition = runtime.engine().graphed_callable(lambda args: [args[0] * weight], miss, 0)
    (result,), observer = observe(lambda: partition([torch.ones(3)]))
    assert not decided and result.tolist() == [1, 1, 1]
    assert addresses([weight]) <= addresses(state_of(observer).tensors())
    with pytest.raises(RuntimeError, match="observed already"):
        observe(lambda: runtime.engine().CallObserver(lambda name: None))
    outside = None
    with contextlib.suppress(RuntimeError):  # without a driver
        outside = partition([torch.ones(3)])[0]
    assert outside is None or outside.tolist() == [3, 3, 3]
