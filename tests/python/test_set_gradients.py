"""The engine sets gradients as an assignment in Python does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pygraph import runtime


def test_gradients_are_set_as_python_sets_them() -> None:
    engine = runtime.engine()
    tensors = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    values = [None, *(torch.full((2,), float(i)) for i in range(3))]
    engine.set_gradients(tensors, values, 1)
    assert all(t.grad is v for t, v in zip(tensors, values[1:], strict=True))
    assert all(map(lambda a, b: a is b, engine.gradients_of(tensors), values[1:]))
    assert engine.gradient_pattern(tensors) == b"\1\1\1"
    engine.clear_gradients(tensors[1:])
    assert engine.has_gradient_pattern(tensors, b"\1\0\0")
    assert not engine.has_gradient_pattern(tensors, b"\1\0\1")
    assert not engine.has_gradient_pattern(tensors, b"\1\0")
    assert len(engine.gradients_of(tensors)) == 1


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, dtype=torch.float64), "text", 1])
def test_gradients_that_python_refuses_are_refused(value: Any) -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    with pytest.raises((RuntimeError, TypeError)) as expected:
        tensor.grad = value
    with pytest.raises(expected.type) as found:
        runtime.engine().set_gradients([tensor], [value], 0)
    assert str(found.value) == str(expected.value) and tensor.grad is None


def test_as_many_gradients_as_tensors_are_asked_for() -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    for values in ([], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(ValueError, match="not as many gradients as tensors"):
            runtime.engine().set_gradients([tensor], values, 0)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_another_type_that_a_tensor_asks_for(dtype: Any) -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    tensor.grad_dtype = dtype  # type: ignore[attr-defined]
    value = torch.ones(2, dtype=torch.float64)
    runtime.engine().set_gradients([tensor], [value], 0)
    assert tensor.grad is value
    if dtype is not None:
        with pytest.raises(RuntimeError, match="grad_dtype"):
            runtime.engine().set_gradients([tensor], [torch.ones(2)], 0)


def test_a_tensor_is_not_its_own_gradient() -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="its own grad"):
        runtime.engine().set_gradients([tensor], [tensor], 0)


def test_a_class_with_a_setter_of_its_own_is_asked() -> None:
    class Told(torch.nn.Parameter):
        def __setattr__(self, name: str, value: Any) -> None:
            seen.append((name, value))

    seen: list[Any] = []
    value = torch.ones(2)
    runtime.engine().set_gradients([Told(torch.ones(2))], [value], 0)
    assert [(name, v is value) for name, v in seen] == [("grad", True)]


def test_a_setter_that_replaces_pytorchs_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, value, seen = torch.nn.Parameter(torch.ones(2)), torch.ones(2), []
    monkeypatch.setattr(
        torch.Tensor, "grad", property(lambda self: None, lambda self, v: seen.append(v)), raising=False
    )
    runtime.engine().set_gradients([tensor], [value], 0)
    assert len(seen) == 1 and seen[0] is value


def test_modes_see_what_is_set() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    tensor = torch.nn.Parameter(torch.ones(2))
    with Mode():
        runtime.engine().set_gradients([tensor], [torch.ones(2)], 0)
    assert torch.Tensor.grad.__set__ in seen
