"""Attacks on ``pygraph.graph``: what a program changes between calls must be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime

from . import frozen_world
from .graphed_world import Replaying


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    known = set(runtime.partitions)
    yield frozen_world.install(monkeypatch)
    for partition in set(runtime.partitions) - known:
        runtime.partitions.discard(partition)


def replays(partitions: Any) -> int:
    return sum(p.replays for p in partitions.all)


def test_world_itself(partitions: Any) -> None:
    import torch.nn.functional as F

    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
        )
        o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

        def step(x: Any, y: Any) -> Any:
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            o.zero_grad()
            return loss

        return m, step

    (m, s), (m2, s2) = make(), make()
    g = pygraph.graph(s)
    for _i in range(12):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        assert torch.equal(g(x, y), s2(x, y))
        for a, b in zip(m.state_dict().values(), m2.state_dict().values(), strict=False):
            assert torch.equal(a, b)
    assert replays(partitions) >= 5


X = torch.arange(4.0)


def served(function: Any, change: Any, *args: Any, calls: int = 8) -> tuple[Any, Any]:
    """The graphed callable's and the function's own result, after a change between the calls."""
    graphed = pygraph.graph(function)
    for _ in range(calls):
        graphed(*(args or (X,)))
    change()
    a = graphed(*(args or (X,)))
    return a, function(*(args or (X,)))


def assert_follows(partitions: Any, function: Any, change: Any, *args: Any) -> None:
    got, expected = served(function, change, *args)
    assert torch.equal(got, expected), f"{got} for {expected} after {replays(partitions)} replays"


class Plain:
    def __init__(self, **k: Any) -> None:
        self.__dict__.update(k)


def test_control(partitions: Any) -> None:
    o = Plain(scale=2.0)
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))
    assert replays(partitions) > 3


def test_an_alias_that_points_to_another_object(partitions: Any) -> None:
    a, b = Plain(scale=2.0), Plain(scale=3.0)
    o = Plain(active=a, a=a, b=b)
    assert_follows(partitions, lambda x: x * o.active.scale, lambda: setattr(o, "active", b))


def test_an_alias_of_modules(partitions: Any) -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.active = None
            self.experts = torch.nn.ModuleList([torch.nn.Dropout(0.5), torch.nn.Identity()])
            self.__dict__["active"] = self.experts[1].eval()

        def forward(self, x: Any) -> Any:
            return x + 1 if isinstance(self.active, torch.nn.Identity) else x * 2

    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    o = Plain(active=a, a=a, b=b)
    f = torch.no_grad()(lambda x: o.active(x))
    assert_follows(partitions, f, lambda: setattr(o, "active", b))


def test_two_closures_with_a_variable_of_the_same_name_other_order(partitions: Any) -> None:
    def make(k: float) -> Any:
        def get() -> float:
            return k

        def put(value: float) -> None:
            nonlocal k
            k = value

        return get, put

    (f, _), (g, set_g) = make(2.0), make(3.0)
    pair = [f, g]
    got, expected = served(lambda x: x * pair[0]() + pair[1](), lambda: set_g(5.0))
    assert torch.equal(got, expected)


def test_fraction(partitions: Any) -> None:
    from fractions import Fraction

    o = Plain(scale=Fraction(1, 2))
    assert_follows(
        partitions, lambda x: x * float(o.scale), lambda: setattr(o, "scale", Fraction(1, 3))
    )


def test_method_descriptor(partitions: Any) -> None:
    o = Plain(act=torch.Tensor.sin)
    assert_follows(partitions, lambda x: o.act(x), lambda: setattr(o, "act", torch.Tensor.cos))


def test_itemgetter(partitions: Any) -> None:
    import operator

    o = Plain(pick=operator.itemgetter(1))
    assert_follows(
        partitions,
        lambda x: x * o.pick((1.0, 2.0, 3.0)),
        lambda: setattr(o, "pick", operator.itemgetter(2)),
    )


def test_np_dtype(partitions: Any) -> None:
    import numpy as np

    o = Plain(f=np.sin)
    assert_follows(partitions, lambda x: x * float(o.f(1.0)), lambda: setattr(o, "f", np.cos))


def test_array_changed_in_place(partitions: Any) -> None:
    import array

    a = array.array("d", [2.0])
    assert_follows(partitions, lambda x: x * a[0], lambda: a.__setitem__(0, 3.0))


def test_bytearray(partitions: Any) -> None:
    a = bytearray(b"\2")
    assert_follows(partitions, lambda x: x * a[0], lambda: a.__setitem__(0, 3))


def test_attributes_of_a_dict_subclass(partitions: Any) -> None:
    class Config(dict):
        pass

    c = Config()
    c.scale = 2.0
    assert_follows(partitions, lambda x: x * c.scale, lambda: setattr(c, "scale", 3.0))


def test_attributes_of_a_list_subclass(partitions: Any) -> None:
    class Config(list):
        pass

    c = Config()
    c.scale = 2.0
    assert_follows(partitions, lambda x: x * c.scale, lambda: setattr(c, "scale", 3.0))


def test_objects_in_a_deque(partitions: Any) -> None:
    import collections

    o = Plain(scale=2.0)
    d = collections.deque([o])
    assert_follows(partitions, lambda x: x * d[0].scale, lambda: setattr(o, "scale", 3.0))


def test_slots_contents(partitions: Any) -> None:
    class S:
        __slots__ = ("config",)

    s = S()
    s.config = {"scale": 2.0}
    assert_follows(partitions, lambda x: x * s.config["scale"], lambda: s.config.update(scale=3.0))


def test_private_slots(partitions: Any) -> None:
    class S:
        __slots__ = ("__scale",)

        def put(self, v: float) -> None:
            self.__scale = v

        def get(self) -> float:
            return self.__scale

    s = S()
    s.put(2.0)
    assert_follows(partitions, lambda x: x * s.get(), lambda: s.put(3.0))


def test_function_attribute(partitions: Any) -> None:
    def helper() -> float:
        return helper.scale

    helper.scale = 2.0
    assert_follows(partitions, lambda x: x * helper(), lambda: setattr(helper, "scale", 3.0))


def test_attribute_of_the_graphed_itself(partitions: Any) -> None:
    def step(x: Any) -> Any:
        return x * step.scale

    step = pygraph.graph(step)
    step.scale = 2.0
    for _ in range(8):
        step(X)
    step.scale = 3.0
    assert torch.equal(step(X), X * 3.0)


def test_inner_graphed(partitions: Any) -> None:
    o = Plain(scale=2.0)
    inner = pygraph.graph(lambda x: x * o.scale)
    assert_follows(partitions, lambda x: inner(x) + 1, lambda: setattr(o, "scale", 3.0))


def test_compiled_module_mode(partitions: Any) -> None:
    m = torch.compile(torch.nn.Dropout(0.0), backend="eager")
    m.scale = 1

    class M(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if self.training else x * 3

    inner = M()
    m = torch.compile(inner, backend="eager")
    assert_follows(partitions, lambda x: m(x), lambda: m.eval())


def test_fx_module_mode(partitions: Any) -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = torch.nn.BatchNorm1d(4)

        def forward(self, x: Any) -> Any:
            return self.bn(x)

    m = torch.fx.symbolic_trace(M())
    f = torch.no_grad()(lambda x: m(x))
    assert_follows(partitions, f, lambda: m.eval(), torch.randn(3, 4))


def test_scripted_module_mode(partitions: Any) -> None:
    m = torch.jit.script(torch.nn.Sequential(torch.nn.BatchNorm1d(4)))
    f = torch.no_grad()(lambda x: m(x))
    assert_follows(partitions, f, lambda: m.eval(), torch.randn(3, 4))


def test_weakref(partitions: Any) -> None:
    import weakref

    o = Plain(scale=2.0)
    h = Plain(r=weakref.ref(o))
    f = lambda x: x * h.r().scale  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(o, "scale", 3.0))


def test_generator_with_the_same_place(partitions: Any) -> None:
    def numbers() -> Any:
        n = 0
        while True:
            n += 1
            yield n

    it = numbers()

    def f(x: Any) -> Any:
        return x * (2 if next(it) > 40 else 1)

    graphed = pygraph.graph(f)
    for i in range(60):
        got = graphed(X)
        assert torch.equal(got, X * (2 if i + 1 > 40 else 1)), (
            f"call {i + 1}, {replays(partitions)} replays"
        )


def test_cycle(partitions: Any) -> None:
    import itertools

    it = itertools.cycle([1.0] * 20 + [2.0])
    f = lambda x: x * next(it)  # noqa: E731
    expected = itertools.cycle([1.0] * 20 + [2.0])
    graphed = pygraph.graph(f)
    for i in range(30):
        got = graphed(X)
        assert torch.equal(got, X * next(expected)), f"call {i + 1}, {replays(partitions)} replays"


def test_enumerate(partitions: Any) -> None:
    it = enumerate([0.0] * 100)
    graphed = pygraph.graph(lambda x: x * (2 if next(it)[0] > 40 else 1))
    for i in range(60):
        assert torch.equal(graphed(X), X * (2 if i > 40 else 1)), f"call {i + 1}"


def test_order_of_a_dict(partitions: Any) -> None:
    d = {"a": 1.0, "b": 2.0}

    def reorder() -> None:
        d["a"] = d.pop("a")

    def f(x: Any) -> Any:
        for k in d.values():
            x = x * k + 1
        return x

    assert_follows(partitions, f, reorder)


def test_order_of_modules(partitions: Any) -> None:
    m = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4))

    def reorder() -> None:
        m._modules["0"] = m._modules.pop("0")

    assert_follows(partitions, torch.no_grad()(lambda x: m(x)), reorder)


def test_order_of_an_ordered_dict(partitions: Any) -> None:
    import collections

    d = collections.OrderedDict(a=1.0, b=2.0)

    def f(x: Any) -> Any:
        for k in d.values():
            x = x * k + 1
        return x

    assert_follows(partitions, f, lambda: d.move_to_end("a"))


def test_strides_of_a_parameter(partitions: Any) -> None:
    p = torch.arange(16.0).reshape(4, 4)

    def change() -> None:
        p.data = p.data.t()

    assert_follows(partitions, lambda x: x @ p, change)


def test_offset_of_a_parameter(partitions: Any) -> None:
    flat = torch.arange(8.0)
    p = torch.nn.Parameter(flat[:4])

    def change() -> None:
        p.data = flat[4:]

    assert_follows(partitions, torch.no_grad()(lambda x: x + p), change)


def test_transposed_in_place(partitions: Any) -> None:
    p = torch.arange(16.0).reshape(4, 4)
    assert_follows(partitions, lambda x: x @ p, lambda: p.t_())


def test_attribute_of_a_tensor(partitions: Any) -> None:
    p = torch.arange(4.0)
    p.scale = 2.0
    assert_follows(partitions, lambda x: x + p * p.scale, lambda: setattr(p, "scale", 3.0))


def test_hook_of_a_parameter(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def f(x: Any) -> Any:
        (g,) = torch.autograd.grad((x * p).sum(), p)
        return g

    def change() -> None:
        p.register_hook(lambda g: g * 2)

    assert_follows(partitions, f, change)


def test_what_a_hook_of_a_parameter_reads(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    o = Plain(scale=2.0)
    p.register_hook(lambda g: g * o.scale)
    f = lambda x: torch.autograd.grad((x * p).sum(), p)[0]  # noqa: E731
    assert_follows(partitions, f, lambda: setattr(o, "scale", 3.0))


def test_code_of_a_function(partitions: Any) -> None:
    def helper(x: Any) -> Any:
        return x * 2

    def other(x: Any) -> Any:
        return x * 3

    def change() -> None:
        helper.__code__ = other.__code__

    assert_follows(partitions, lambda x: helper(x), change)


def test_defaults_of_a_function(partitions: Any) -> None:
    def helper(x: Any, k: float = 2.0) -> Any:
        return x * k

    def change() -> None:
        helper.__defaults__ = (3.0,)

    assert_follows(partitions, lambda x: helper(x), change)


def test_class_of_an_instance(partitions: Any) -> None:
    class A:
        def f(self) -> float:
            return 2.0

    class B:
        def f(self) -> float:
            return 3.0

    o = A()

    def change() -> None:
        o.__class__ = B

    assert_follows(partitions, lambda x: x * o.f(), change)


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


def test_a_result_that_is_a_leaf(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x: (x * 2).requires_grad_())
    for i in range(8):
        assert graphed(X).requires_grad, f"call {i + 1}"


def test_learning_rate_that_is_returned(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    o = torch.optim.AdamW([p], lr=0.1, fused=True)

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        o.step()
        o.zero_grad()
        return o.param_groups[0]["lr"]

    graphed = pygraph.graph(f)
    for i in range(2):
        assert type(graphed(X)) is float, f"call {i + 1}"
    with pytest.raises(RuntimeError, match="another structure"):  # which a partition makes a reason
        for _ in range(3):
            graphed(X)


def test_getattr_that_answers_all(partitions: Any) -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return None

    o = Anything()
    graphed = pygraph.graph(lambda x: x * 2 if o.y is None else x)
    for _ in range(4):
        graphed(X)


def test_getattr_that_raises(partitions: Any) -> None:
    class Closed:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the connection is closed")

    o = Plain(connection=Closed(), scale=2.0)
    graphed = pygraph.graph(lambda x: x * o.scale)
    for _ in range(4):
        graphed(X)


def test_key_whose_repr_raises(partitions: Any) -> None:
    class Key:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    d = {Key(): 1.0}
    graphed = pygraph.graph(lambda x: x * sum(d.values()))
    for _ in range(4):
        graphed(X)


def test_an_unhashable_value(partitions: Any) -> None:
    class Text(str):
        __hash__ = None

    graphed = pygraph.graph(lambda x, t: x * 2)
    for _ in range(4):
        graphed(X, Text("a"))


def test_a_keyword_that_is_called_self(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x, self: x * self)
    graphed(X, self=2.0)


def test_deepcopy(partitions: Any) -> None:
    import copy

    o = Plain(step=pygraph.graph(lambda x: x * 2))
    copy.deepcopy(o)


def test_zero_of_a_complex(partitions: Any) -> None:
    def f(x: Any, z: Any) -> Any:
        return x * torch.angle(
            torch.tensor(complex(-1.0, 0.0) if str(z.imag) == "0.0" else complex(1.0))
        )

    graphed = pygraph.graph(f)
    for _ in range(8):
        graphed(X, complex(1.0, 0.0))
    assert torch.equal(graphed(X, complex(1.0, -0.0)), f(X, complex(1.0, -0.0)))


def test_graphed_method_is_collected(partitions: Any) -> None:
    import gc
    import weakref

    class Trainer:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(4, 4)
            self.step = pygraph.graph(self._step)

        def _step(self, x: Any) -> Any:
            with torch.no_grad():
                return self.model(x)

    t = Trainer()
    for _ in range(8):
        t.step(X)
    alive = weakref.ref(t.model.weight)
    del t
    partitions.all.clear()
    gc.collect()
    assert alive() is None


def test_replaced_parameters_are_freed(partitions: Any) -> None:
    import gc
    import weakref

    m = torch.nn.Linear(4, 4)
    graphed = pygraph.graph(torch.no_grad()(lambda x: m(x)))
    old = []
    for _ in range(6):
        for _ in range(6):
            graphed(X)
        old.append(weakref.ref(m.weight))
        m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)
    for _ in range(6):
        graphed(X)
    partitions.all.clear()
    gc.collect()
    assert sum(r() is not None for r in old) == 0


def test_state_that_was_passed_when_observed(partitions: Any) -> None:
    b = torch.zeros(4)

    def f(x: Any) -> Any:
        b.add_(1)
        return x + b

    graphed = pygraph.graph(f)
    graphed(b)
    for i in range(6):
        graphed(X)
        assert torch.equal(b, torch.full((4,), i + 2.0)), f"call {i + 2}: {b}"


def test_a_local_import(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked_config.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_config

    def f(x: Any) -> Any:
        import attacked_config

        return x * attacked_config.SCALE

    assert_follows(partitions, f, lambda: setattr(attacked_config, "SCALE", 3.0))


def test_a_package_by_its_dotted_name(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked").mkdir()
    (tmp_path / "attacked/__init__.py").write_text("")
    (tmp_path / "attacked/config.py").write_text("SCALE = 2.0\n")
    (tmp_path / "attacked/main.py").write_text(
        "import attacked.config\n\n\ndef f(x):\n    return x * attacked.config.SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import attacked.config
    import attacked.main

    assert_follows(partitions, attacked.main.f, lambda: setattr(attacked.config, "SCALE", 3.0))


def test_two_modules_with_a_global_of_the_same_name(
    partitions: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    for name in "ab":
        (tmp_path / f"attacked_{name}.py").write_text(
            "SCALE = 2.0\n\n\ndef f(x):\n    return x * SCALE + 1\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_a
    import attacked_b

    for module in (attacked_a, attacked_b):
        monkeypatch.setattr(module, "SCALE", 2.0)
        f = lambda x: attacked_a.f(attacked_b.f(x))  # noqa: E731
        fs = [attacked_a.f, attacked_b.f]
        f = lambda x, fs=fs: fs[0](fs[1](x))  # noqa: E731
        assert_follows(partitions, f, lambda m=module: setattr(m, "SCALE", m.SCALE + 1))


def test_globals_of_a_dunder_method(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked_c.py").write_text(
        "SCALE = 2.0\n\n\nclass Table:\n    def __getitem__(self, i):\n        return SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_c

    t = attacked_c.Table()
    assert_follows(partitions, lambda x: x * t[0], lambda: setattr(attacked_c, "SCALE", 3.0))


def test_a_program_module_with_a_librarys_first_letters(
    partitions: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "logging_tools.py").write_text(
        "class Config:\n    def __init__(self):\n        self.scale = 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import logging_tools

    o = logging_tools.Config()
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))


def test_an_attribute_that_is_a_module(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked_d.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_d

    o = Plain(config=attacked_d)
    assert_follows(partitions, lambda x: x * o.config.SCALE, lambda: setattr(attacked_d, "SCALE", 3.0))


def test_thread_local(partitions: Any) -> None:
    import threading

    o = threading.local()
    o.scale = 2.0
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))


def test_mapping_proxy(partitions: Any) -> None:
    import types

    d = {"scale": 2.0}
    p = types.MappingProxyType(d)
    o = Plain(p=p)
    f = lambda x: x * o.p["scale"]  # noqa: E731
    assert_follows(partitions, f, lambda: d.update(scale=3.0))


def test_global_that_is_only_written(partitions: Any) -> None:
    scope: dict[str, Any] = {"__name__": "attacked_e"}
    exec(
        compile(
            "def f(x):\n    global DONE\n    DONE = True\n    return x * 2\n",
            "/tmp/attacked_e.py",
            "exec",
        ),
        scope,
    )
    graphed = pygraph.graph(scope["f"])
    for i in range(8):
        scope["DONE"] = False
        graphed(X)
        assert scope["DONE"], f"call {i + 1}"


def test_resting_is_cheap(partitions: Any, monkeypatch: Any) -> None:
    from pygraph.callables import host_state

    walks = []
    real = host_state.reachable_from
    monkeypatch.setattr(host_state, "reachable_from", lambda *a: walks.append(1) or real(*a))
    o = Plain(n=0.0)
    graphed = pygraph.graph(lambda x: x * o.n)
    for i in range(30):
        o.n = float(i)
        graphed(X)
    walks.clear()
    for i in range(10):
        o.n = float(100 + i)
        graphed(X)
    assert not walks


def test_refusals_of_one_mode_do_not_count_for_another(partitions: Any) -> None:
    import random

    o = Plain(training=True)
    graphed = pygraph.graph(lambda x: x * random.random() if o.training else x * 2)
    for _ in range(5):
        graphed(X)
    o.training = False
    for _ in range(8):
        graphed(X)
    assert replays(partitions) > 0


def test_failing_calls_are_no_strangers(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x: x.view(4))
    for _ in range(10):
        with pytest.raises(RuntimeError):
            graphed(torch.ones(3))
    for _ in range(8):
        graphed(X)
    assert replays(partitions) > 0


def test_interrupted_rehearsal(partitions: Any) -> None:
    m = torch.nn.Linear(4, 4)
    o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    n = []
    stop = Plain(at=-1)

    def f(x: Any) -> Any:
        n.append(0) if False else None
        m(x).sum().backward()
        if stop.at == 1:
            raise KeyboardInterrupt
        o.step()
        o.zero_grad()

    graphed = pygraph.graph(f)
    for _ in range(5):
        graphed(X)
    pointers = [p.data_ptr() for p in m.parameters()]
    stop.at = 1
    with pytest.raises(KeyboardInterrupt):
        graphed(X)
    stop.at = -1
    assert pointers == [p.data_ptr() for p in m.parameters()]
    assert type(o.param_groups[0]["lr"]) is float


def test_a_set_in_rehearsals(partitions: Any) -> None:
    """What a rehearsal adds to a set, a deque, or an object with slots is put back."""
    seen: set[int] = set()
    o = Plain(on=False)

    class S:
        __slots__ = ("n",)

    s = S()
    s.n = 0

    def f(x: Any) -> Any:
        # Clean for some calls, then not: as a warm-up that ends.
        if o.on:
            seen.add(len(seen))
            s.n += 1
        return x * 2

    graphed = pygraph.graph(f)
    graphed(X)
    o.on = True
    for i in range(8):
        graphed(X)
        assert len(seen) == s.n == i + 1, f"{len(seen)} {s.n} {i + 1}"


def test_clean_for_two_calls(partitions: Any) -> None:
    """A counter that starts after the first calls, kept where the snapshot cannot see it."""

    class Log:
        __slots__ = ("entries",)

    log = Log()
    log.entries = []

    def f(x: Any) -> Any:
        log.entries.append(1)
        return x * 2

    graphed = pygraph.graph(f)
    for i in range(8):
        graphed(X)
        assert len(log.entries) == i + 1, f"call {i + 1}: {len(log.entries)}"


def test_lr_as_numpy_number(partitions: Any) -> None:
    import numpy as np

    p = torch.nn.Parameter(torch.ones(4))
    o = torch.optim.AdamW([p], lr=0.1, fused=True)

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        o.step()
        o.zero_grad()

    graphed = pygraph.graph(f)
    for i in range(20):
        o.param_groups[0]["lr"] = np.float64(0.1 / (i + 1))
        graphed(X)
    assert replays(partitions) > 3, pygraph.stats()


def test_the_lr_that_the_step_computes_with(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    o = torch.optim.AdamW([p], lr=0.1, fused=True)

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        o.step()
        o.zero_grad()
        return x.double() * o.param_groups[0]["lr"]

    graphed = pygraph.graph(f)
    for i in range(20):
        o.param_groups[0]["lr"] = 0.1 / (i + 1)
        assert torch.equal(graphed(X), X.double() * (0.1 / (i + 1))), f"call {i + 1}"


def test_lr_that_becomes_another_groups(partitions: Any) -> None:
    """A new dictionary of a group, as load_state_dict makes: the rate must still be followed."""

    def make() -> Any:
        p = torch.nn.Parameter(torch.ones(4))
        o = torch.optim.AdamW([p], lr=0.1, fused=True)

        def f(x: Any) -> Any:
            (x * p).sum().backward()
            o.step()
            o.zero_grad()

        return p, o, f

    (p, o, f), (p2, o2, f2) = make(), make()
    graphed = pygraph.graph(f)
    for i in range(30):
        if i in (8, 16):
            o.load_state_dict(o.state_dict())
            o2.load_state_dict(o2.state_dict())
        o.param_groups[0]["lr"] = o2.param_groups[0]["lr"] = 0.1 / (i + 1)
        graphed(X)
        f2(X)
        assert torch.equal(p, p2), f"call {i + 1}, {replays(partitions)} replays"
    assert replays(partitions) > 3


def test_a_group_that_is_replaced(partitions: Any) -> None:
    def make() -> Any:
        p = torch.nn.Parameter(torch.ones(4))
        o = torch.optim.AdamW([p], lr=0.1, fused=True)

        def f(x: Any) -> Any:
            (x * p).sum().backward()
            o.step()
            o.zero_grad()

        return p, o, f

    (p, o, f), (p2, o2, f2) = make(), make()
    graphed = pygraph.graph(f)
    for i in range(20):
        for of in (o, o2):
            if i == 8:
                of.param_groups[0] = dict(of.param_groups[0])
            of.param_groups[0]["lr"] = 0.1 / (i + 1)
        graphed(X)
        f2(X)
        assert torch.equal(p, p2), f"call {i + 1}, {replays(partitions)} replays"


def test_retain_grad_and_double_backward(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))

    def f(x: Any) -> Any:
        y = (p * x).pow(3).sum()
        (g,) = torch.autograd.grad(y, p, create_graph=True)
        g.pow(2).sum().backward()
        out = p.grad.clone()
        p.grad = None
        return out, y

    graphed = pygraph.graph(f)
    for i in range(8):
        x = torch.full((3,), float(i))
        assert torch.equal(graphed(x)[0], f(x)[0])


def test_registered_global_module_hook(partitions: Any) -> None:
    m = torch.nn.ReLU()
    hooks = []

    def change() -> None:
        hooks.append(torch.nn.modules.module.register_module_forward_hook(lambda mod, a, out: out * 2))

    try:
        assert_follows(partitions, lambda x: m(x), change)
    finally:
        for h in hooks:
            h.remove()


def test_anomalies_that_are_looked_for(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    def f(x: Any) -> Any:
        y = torch.where(x == 0, x * p / x, x * p)
        (g,) = torch.autograd.grad(y.sum(), p)
        return g

    graphed = pygraph.graph(f)
    for _ in range(8):
        graphed(X + 1)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError):
        graphed(X)


def test_a_float_with_an_equality_of_its_own(partitions: Any) -> None:
    class Odd(float):
        def __eq__(self, other: Any) -> bool:
            return True

        __hash__ = float.__hash__

    o = Plain(scale=Odd(2.0))
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", Odd(3.0)))


def test_an_enum_with_a_value_that_changes(partitions: Any) -> None:
    import enum

    class Mode(enum.Enum):
        TRAIN = 1

    Mode.TRAIN.scale = 2.0
    assert_follows(
        partitions, lambda x: x * Mode.TRAIN.scale, lambda: setattr(Mode.TRAIN, "scale", 3.0)
    )


def test_a_float_subclass_in_a_list(partitions: Any) -> None:
    import collections

    d = collections.deque([1])
    i = torch.arange(4)
    f = lambda x: x * d[0]  # noqa: E731
    got, expected = served(f, lambda: (d.pop(), d.append(1.0)), i)
    assert got.dtype == expected.dtype


def test_all_inputs_are_empty(partitions: Any) -> None:
    z = torch.zeros(0)
    graphed = pygraph.graph(lambda: z * 2)
    for _ in range(8):
        assert graphed().numel() == 0


def test_keys_of_refused_calls_do_not_pile_up(partitions: Any) -> None:
    graphed = pygraph.graph(lambda x, lr: x * lr)
    for i in range(300):
        graphed(X, float(i))
    assert len(graphed._variants) < 100


def test_a_step_with_a_warm_up(partitions: Any) -> None:
    o = Plain(n=0)

    def f(x: Any) -> Any:
        if o.n < 6:
            o.n += 1
        return x * 2

    graphed = pygraph.graph(f)
    for _ in range(20):
        graphed(X)
    assert replays(partitions) > 3


def test_an_error_of_a_probe(partitions: Any) -> None:
    class Closing:
        def __init__(self) -> None:
            self.left = 6

        def __length_hint__(self) -> int:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("closed")
            return 3

    o = Plain(stream=Closing())
    graphed = pygraph.graph(lambda x: x * (1 if o.stream else 2))
    for _ in range(12):
        graphed(X)


def test_a_property_of_the_program_is_not_asked(partitions: Any) -> None:
    asked = []

    class Lazy:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    o = Plain(lazy=Lazy())
    graphed = pygraph.graph(lambda x: x * (1 if o.lazy else 2))
    for _ in range(6):
        graphed(X)
    assert not asked


def test_a_random_state_that_is_put_back(partitions: Any) -> None:
    import random

    def f(x: Any) -> Any:
        state = random.getstate()
        random.seed(3)
        k = random.random()
        random.setstate(state)
        return x * k

    graphed = pygraph.graph(f)
    for _ in range(8):
        assert torch.equal(graphed(X), f(X))


def test_initial_seed(partitions: Any) -> None:
    torch.manual_seed(1)
    f = lambda x: x * (torch.initial_seed() % 7)  # noqa: E731
    assert_follows(partitions, f, lambda: torch.manual_seed(2))


def test_numbers_of_a_context_variable(partitions: Any) -> None:
    import contextvars

    v: contextvars.ContextVar[float] = contextvars.ContextVar("v", default=2.0)
    o = Plain(v=v)
    assert_follows(partitions, lambda x: x * o.v.get(), lambda: v.set(3.0))


def test_cuda_like_default_device_and_dtype(partitions: Any) -> None:
    try:
        assert_follows(
            partitions, lambda x: x + torch.ones(4), lambda: torch.set_default_dtype(torch.float64)
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_lru_cache(partitions: Any) -> None:
    import functools

    o = Plain(n=2.0)

    @functools.lru_cache
    def scale() -> float:
        return o.n

    def change() -> None:
        o.n = 3.0
        scale.cache_clear()

    assert_follows(partitions, lambda x: x * scale(), change)


def test_staticmethod_and_metaclass_attribute(partitions: Any) -> None:
    class Meta(type):
        scale = 2.0

    class A(metaclass=Meta):
        pass

    assert_follows(partitions, lambda x: x * A.scale, lambda: setattr(Meta, "scale", 3.0))


def test_a_class_in_a_dunder_named_attribute(partitions: Any) -> None:
    class A:
        __scale__ = 2.0

    assert_follows(partitions, lambda x: x * A.__scale__, lambda: setattr(A, "__scale__", 3.0))


def test_two_classes_of_one_name(partitions: Any) -> None:
    def make(k: float) -> Any:
        class Config:
            scale = k

        return Config

    a, b = make(2.0), make(3.0)
    for of in (a, b):
        assert_follows(
            partitions,
            lambda x: x * a.scale + b.scale,
            lambda of=of: setattr(of, "scale", of.scale + 1),
        )


def test_a_dict_with_keys_of_one_repr(partitions: Any) -> None:
    class Key:
        def __repr__(self) -> str:
            return "Key()"

    k, m = Key(), Key()
    d = {k: 1.0, m: 2.0}
    for key in (k, m):
        assert_follows(
            partitions, lambda x: x * d[k] + d[m], lambda key=key: d.__setitem__(key, d[key] + 1)
        )


def test_gradients_that_the_program_clears_by_itself(partitions: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Linear(4, 4)

        def f(x: Any) -> Any:
            m(x).sum().backward()

        return m, f

    (m, f), (m2, f2) = make(), make()
    graphed = pygraph.graph(f)
    for i in range(24):
        for of in (m, m2):
            if i % 3 == 0:
                of.zero_grad()
            if i % 5 == 0:
                of.bias.grad = None
        x = torch.full((4,), float(i))
        graphed(x)
        f2(x)
        for a, b in zip(m.parameters(), m2.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), f"call {i + 1}"


def test_requires_grad_toggled(partitions: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)

        def f(x: Any) -> Any:
            m(x).sum().backward()
            o.step()
            o.zero_grad()

        return m, f

    (m, f), (m2, f2) = make(), make()
    graphed = pygraph.graph(f)
    for i in range(40):
        for of in (m, m2):
            of[0].requires_grad_((i // 8) % 2 == 0)
        x = torch.full((4,), float(i % 3))
        graphed(x)
        f2(x)
        for a, b in zip(m.parameters(), m2.parameters(), strict=True):
            assert torch.equal(a, b), f"call {i + 1}"


def test_checkpoint_loaded_midway_with_copies(partitions: Any) -> None:
    import copy

    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Linear(4, 4)
        o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
        s = torch.optim.lr_scheduler.ExponentialLR(o, 0.8)

        def f(x: Any) -> Any:
            m(x).sum().backward()
            o.step()
            o.zero_grad()

        return m, o, s, f

    a, b = make(), make()
    graphed = pygraph.graph(a[3])
    saved: list[Any] = []
    for i in range(40):
        for at, (m, o, s, _) in enumerate((a, b)):
            if i == 10:
                saved.append(copy.deepcopy((m.state_dict(), o.state_dict(), s.state_dict())))
            if i in (16, 28):
                for of, state in zip((m, o, s), copy.deepcopy(saved[at]), strict=True):
                    of.load_state_dict(state)
        x = torch.full((4,), float(i % 3))
        graphed(x)
        b[3](x)
        for _, _, s, _ in (a, b):
            s.step()
        for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
            assert torch.equal(p, q), f"call {i + 1}"
    assert replays(partitions) > 5


def test_the_state_dict_of_an_optimizer_is_loaded_back(partitions: Any) -> None:
    """As after a check of gradients: the optimizer's state is rolled back by its own state_dict."""

    def make() -> Any:
        torch.manual_seed(0)
        m = torch.nn.Linear(4, 4)
        o = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)

        def f(x: Any) -> Any:
            m(x).sum().backward()
            o.step()
            o.zero_grad()

        return m, o, f

    a, b = make(), make()
    graphed = pygraph.graph(a[2])
    for i in range(30):
        for _, o, _ in (a, b):
            if i == 10:
                o.load_state_dict(o.state_dict())
            for group in o.param_groups:
                group["lr"] = 0.1 / (i + 1)
        x = torch.full((4,), float(i % 3))
        graphed(x)
        b[2](x)
        for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
            assert torch.equal(p, q), f"call {i + 1}, {replays(partitions)}"


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


def test_a_hook_that_counts(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    n = Plain(n=0)

    def hook(q: Any) -> None:
        n.n += 1

    p.register_post_accumulate_grad_hook(hook)

    def f(x: Any) -> Any:
        (x * p).sum().backward()
        p.grad = None

    graphed = pygraph.graph(f)
    for i in range(10):
        graphed(X)
        assert n.n == i + 1, f"call {i + 1}: {n.n}"


def test_an_append_to_a_list_in_a_tensor_attribute(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    p.log = []

    def f(x: Any) -> Any:
        p.log.append(1)
        return (x * p).detach()

    graphed = pygraph.graph(f)
    for i in range(10):
        graphed(X)
        assert len(p.log) == i + 1, f"call {i + 1}: {len(p.log)}"


def test_queue_that_is_fed(partitions: Any) -> None:
    import queue

    q: Any = queue.SimpleQueue()
    graphed = pygraph.graph(lambda x: (q.put(1), x * 2)[1])
    for i in range(8):
        graphed(X)
        assert q.qsize() == i + 1, f"call {i + 1}: {q.qsize()}"


def test_appended_through_a_local_list(partitions: Any) -> None:

    class Meter(dict):
        total = 0

        def update_(self, n: int) -> None:
            self.__dict__["count"] = self.__dict__.get("count", 0) + n

    m = Meter()
    graphed = pygraph.graph(lambda x: (m.update_(1), x * 2)[1])
    for i in range(8):
        graphed(X)
        assert m.count == i + 1, f"call {i + 1}: {m.count}"


def test_a_compiled_module_that_counts(partitions: Any) -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def forward(self, x: Any) -> Any:
            self.n += 1
            return x * 2

    inner = M()
    m = torch.compile(inner, backend="eager")
    graphed = pygraph.graph(lambda x: m(x))
    for i in range(8):
        graphed(X)
        assert inner.n == i + 1, f"call {i + 1}: {inner.n}"


def test_a_classmethod(partitions: Any) -> None:
    class A:
        scale = 2.0

        @pygraph.graph
        @classmethod
        def f(cls, x: Any) -> Any:
            return x * cls.scale

    assert torch.equal(A.f(X), X * 2)


def test_old_gradients_that_the_program_keeps(partitions: Any) -> None:
    """Of a module that is not walked, as a compiled one."""

    def make() -> Any:
        torch.manual_seed(0)
        inner = torch.nn.Linear(4, 4)
        module = torch.compile(inner, backend="eager")

        def f(x: Any) -> None:
            module(x).sum().backward()

        return inner, f

    (m, f), (m2, f2) = make(), make()
    graphed = pygraph.graph(f)
    saved = []
    for i in range(16):
        if i == 12:
            saved = [p.grad for p in m.parameters()]
            m.zero_grad()
            m2.zero_grad()
        graphed(X)
        f2(X)
        for p, q in zip(m.parameters(), m2.parameters(), strict=True):
            assert p.grad is not None and torch.equal(p.grad, q.grad), f"call {i + 1}"
    del saved
