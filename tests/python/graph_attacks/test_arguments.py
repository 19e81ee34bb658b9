"""What is passed, and what the callable does to it."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, replays


def test_a_passed_dict_that_is_changed(partitions: Any) -> None:
    def f(batch: Any) -> Any:
        scale = batch.pop("scale")
        return batch["x"] * scale

    graphed = pygraph.graph(f)
    for i in range(8):
        batch = {"x": X, "scale": 2.0}
        graphed(batch)
        assert "scale" not in batch, f"call {i + 1}"


def test_a_passed_list_that_is_changed(partitions: Any) -> None:
    def f(x: Any, names: Any) -> Any:
        names.append("called")
        return x * 2

    graphed = pygraph.graph(f)
    for i in range(8):
        names: list[str] = []
        graphed(X, names)
        assert names == ["called"], f"call {i + 1}"


def test_an_argument_that_gets_a_flag(partitions: Any) -> None:
    def f(x: Any) -> Any:
        x.requires_grad_()
        return torch.autograd.grad((x * x).sum(), x)[0]

    graphed = pygraph.graph(f)
    for i in range(8):
        x = torch.ones(3)
        graphed(x)
        assert x.requires_grad, f"call {i + 1}"


def test_an_argument_that_is_transposed(partitions: Any) -> None:
    def f(x: Any) -> Any:
        x.t_()
        return x * 2

    graphed = pygraph.graph(f)
    for i in range(8):
        x = torch.ones(3, 4)
        graphed(x)
        assert x.shape == (4, 3), f"call {i + 1}"


def test_attribute_of_an_argument_that_may_be_missing(partitions: Any) -> None:
    def f(x: Any) -> Any:
        return x * getattr(x, "scale", 2.0)

    graphed = pygraph.graph(f)
    for i in range(9):
        x = torch.ones(3)
        if i > 6:
            x.scale = 3.0
        assert torch.equal(graphed(x), f(x)), f"call {i + 1}"


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.add:
            return args[0].as_subclass(torch.Tensor) * 7
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_among_the_arguments(partitions: Any) -> None:
    def f(x: Any) -> Any:
        return x.add(1)

    graphed = pygraph.graph(f)
    for _ in range(8):
        graphed(X)
    assert torch.equal(graphed(X.as_subclass(Doubling)), f(X.as_subclass(Doubling)))


def test_an_unhashable_value(partitions: Any) -> None:
    class Text(str):
        __hash__ = None

    graphed = pygraph.graph(lambda x, t: x * 2)
    for _ in range(4):
        graphed(X, Text("a"))


def test_a_keyword_that_is_called_self(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x, self: x * self)
    graphed(X, self=2.0)


def test_zero_of_a_complex(partitions: Any) -> None:
    def f(x: Any, z: Any) -> Any:
        return x * torch.angle(
            torch.tensor(complex(-1.0, 0.0) if str(z.imag) == "0.0" else complex(1.0))
        )

    graphed = pygraph.graph(f)
    for _ in range(8):
        graphed(X, complex(1.0, 0.0))
    assert torch.equal(graphed(X, complex(1.0, -0.0)), f(X, complex(1.0, -0.0)))


def test_all_inputs_are_empty(partitions: Any) -> None:
    z = torch.zeros(0)
    graphed = pygraph.graph(lambda: z * 2)
    for _ in range(8):
        assert graphed().numel() == 0


def test_named_arguments_order_and_defaults(partitions: Any) -> None:
    def f(x: Any, a: float = 1.0, *, b: float = 2.0, **more: Any) -> Any:
        for v in more.values():
            x = x * v + 1
        return x * a + b

    graphed = pygraph.graph(f)
    for i in range(30):
        k = {"p": 2.0, "q": 3.0} if i % 2 else {"q": 3.0, "p": 2.0}
        if i % 3:
            k["a"] = float(i % 2)
        assert torch.equal(graphed(X, **k), f(X, **k)), f"call {i + 1}"
    assert replays(partitions) > 3


def test_a_bool_for_a_number(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x, k: x * k if isinstance(k, bool) else x + k)
    i = torch.arange(4)
    for n in range(40):
        k = (1, True, 1.0, -0.0, 0.0, 0)[n % 6]
        got, want = graphed(i, k), (i * k if isinstance(k, bool) else i + k)
        assert got.dtype == want.dtype and torch.equal(got, want)
