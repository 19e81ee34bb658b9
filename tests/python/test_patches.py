"""What PyGraph changes in PyTorch: never raises, is of one compilation, and can be turned off."""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import config, decorators, eval_frame, guards
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._guards import Guard

from pygraph import options, runtime
from pygraph.options import ALL, EXACT, LEVELS, NONE
from pygraph.torch_patches import call_overhead, compiled_call, module_guards, parameters
from pygraph.torch_patches import guards as cheaper_guards
from pygraph.torch_patches.patches import Changes
from tests.python.compiled_programs import Backend, OurBackend, ReducingBackend, X


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), scale))
        self.bias = nn.Parameter(torch.full((3,), scale / 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class Model(nn.Module):
    """Has something for each of the changes."""

    factor = np.float64(0.5)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(1.0 + i) for i in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.factor


_GAIN, _ONES, _ONES_OF_NUMPY = np.sqrt(0.5), torch.ones(3), np.ones(3)


class _TableInClass(nn.Module):
    table = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class _TablesInClass(nn.Module):
    tables: ClassVar[dict[str, Any]] = {
        "a": [torch.arange(3.0), np.ones(3)],
        "b": (np.float32(2.0), torch.tensor(4)),
    }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.tables["a"][0] + self.tables["a"][1]) * type(self).tables["b"][0]


class _Base(nn.Module):
    shift = torch.ones(3)
    scale = np.array([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().__getattribute__("shift")


class _Derived(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.from_numpy(super().scale)


class _Cached(nn.Module):
    cache: ClassVar[dict[int, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in _Cached.cache:
            _Cached.cache[x.shape[0]] = torch.ones(x.shape[0]).tril()
        return x * type(self).cache[x.shape[0]]


class _Default(nn.Module):
    def forward(self, x: torch.Tensor, gain: Any = _GAIN, bias: Any = _ONES) -> Any:
        return x * gain + bias


def _scaled(by: torch.Tensor) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(self: Any, x: torch.Tensor) -> Any:
            return function(self, x) * by

        return call

    return decorate


class _Decorated(nn.Module):
    @_scaled(torch.full((3,), 3.0))
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class _Partial(nn.Module):
    move = functools.partial(torch.add, torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.move(x)


class _Meta(type):
    shift = torch.ones(3)

    @property
    def scale(cls) -> Any:
        return np.float64(3.0)


class _OfMeta(nn.Module, metaclass=_Meta):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * type(self).scale + type(self).shift


class _Property(nn.Module):
    hidden = torch.full((3,), 7.0)

    @property
    def seen(self) -> torch.Tensor:
        return self.hidden * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seen if hasattr(self, "seen") else x


def _wrapping() -> nn.Module:
    inner = Model()

    class Wrapper(nn.Module):
        held = (inner,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x) + type(self).held[0](x)

    return Wrapper()


class _ClassMethods(nn.Module):
    weights = nn.ParameterList([nn.Parameter(torch.ones(3))])

    @classmethod
    def shifted(cls, x: torch.Tensor) -> torch.Tensor:
        return x + cls.weights[0]

    @staticmethod
    def scaled(x: torch.Tensor, by: Any = _ONES_OF_NUMPY) -> torch.Tensor:
        return x * by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.shifted(x))


MODELS = (
    *(_TableInClass, _TablesInClass, _Derived, _Cached, _Default, _Decorated, _Partial, _OfMeta),
    *(_Property, _wrapping, _ClassMethods),
)


def _outcomes(make: Callable[[], nn.Module], backend: Backend) -> list[Any]:
    """Of some calls; the kind of an error where Dynamo raises one."""
    torch._dynamo.reset()
    _Cached.cache.clear()
    model = nn.Sequential(make(), nn.Sequential(make()))
    compiled = torch.compile(model, backend=backend)
    found: list[Any] = []
    for x in (X, X, X + 1):
        try:
            found.append(compiled(x).tolist())
        except Exception as error:
            found.append(type(error))
    return [*found, backend.graphs]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_a_model_reaches_through_its_class(make: Callable[[], nn.Module], level: str) -> None:
    plain = _outcomes(make, Backend())
    assert _outcomes(make, ReducingBackend(True, level)) == plain


def _fails(*_: Any, **__: Any) -> Any:
    raise KeyError("injected")


def _fails_in_the_middle(self: Any, codegen: Any) -> None:
    codegen(self.model)
    codegen(self.arguments[0].source.base)
    raise KeyError("injected")


HOOKS = (
    *((call_overhead, "_load_cheaply"), (call_overhead, "_leave_untraced")),
    *((cheaper_guards, "make_cheaper"), (cheaper_guards, "_are_stored")),
    *((cheaper_guards._HooksGuard, "__call__"), (module_guards, "makes_for")),
    *(
        (module_guards, "_is_method"),
        (module_guards, "_keep_apart"),
        (module_guards, "_is_behind_python"),
    ),
    *((parameters, "_runs"), (parameters, "_way_to"), (parameters._Run, "_loader")),
    *((parameters._Run, "_write"), (call_overhead, "_replace_flag"), (call_overhead, "digest_of")),
)


@pytest.mark.parametrize(("owner", "name"), HOOKS, ids=lambda value: getattr(value, "__name__", value))
def test_an_error_in_a_change_never_reaches_the_user(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_without(owner, name, _fails, monkeypatch)


def test_half_written_code_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _check_without(parameters._Run, "_write", _fails_in_the_middle, monkeypatch)


def _check_without(owner: Any, name: str, fails: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(runtime, "notice_once", notices.append)
    backend = ReducingBackend(True, ALL)
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(X), model(X))
        assert backend.graphs == 1
        model.layers[1] = Layer(9.0)
        torch.testing.assert_close(compiled(X), model(X))
    assert len(notices) >= (name != "_is_behind_python")  # which these guards do not ask
    assert all("injected" in notice for notice in notices)
    torch._dynamo.reset()
    notices.clear()
    torch.testing.assert_close(torch.compile(model, backend=backend)(X), model(X))
    assert not notices
    assert any(n.startswith("__pygraph_parameters") for n in _code(Model.forward).co_names)


def test_a_function_is_called_as_pytorch_does_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_call.install()
    notices: list[str] = []
    monkeypatch.setattr(runtime, "notice_once", notices.append)
    for name in ("_cheaper", "_is_ours"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled_call, name, _fails)
            torch._dynamo.reset()
            model = Model()
            torch.testing.assert_close(torch.compile(model, backend=OurBackend())(X), model(X))
    assert len(notices) >= 2


def test_errors_of_other_backends_attributes_stay_theirs() -> None:
    class Strange(Backend):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    compiled_call.install()
    torch._dynamo.reset()
    compiled = eval_frame.optimize(backend=Strange().__call__)(lambda x: x + 1)
    assert torch.equal(compiled(X), X + 1)


def _code(function: Any) -> Any:
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    return entry.code


def _described(function: Any) -> str:
    """Guards and code of a program, without addresses and counters."""
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    instructions = " ".join((*entry.code.co_names, entry.code.co_code.hex()))
    text = re.sub(r"^.*(?:Guard latency|_guards.py).*$", "", str(entry.guard_manager), flags=re.M)
    counted = r"(?<=compiled_fn_)\w+|0x[0-9a-f]+|\d{4,}|_c\d+(?:_\d+)?|(?<=dict___)\d+|(?<=tmp_)\d+"
    return re.sub(counted, "", text + instructions)


class Other(Model):
    """Another backend's."""

    table = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table * self.factor


def _compile_other() -> str:
    model = Other()
    torch.testing.assert_close(torch.compile(model, backend=Backend())(X), model(X))
    return _described(Other.forward)


@pytest.fixture
def plain() -> str:
    torch._dynamo.reset()
    call_overhead.reduce_for_process()
    return _compile_other()


@pytest.fixture(autouse=True)
def dynamo_is_as_before() -> Iterator[None]:
    before = Guard.create, decorators.DisableContext, config.record_runtime_overhead
    yield
    assert before == (Guard.create, decorators.DisableContext, config.record_runtime_overhead)


class _Around(ReducingBackend):
    """Does something else while a program of ours is being compiled, after what it is changed by."""

    def __init__(self, between: Callable[[], Any]) -> None:
        super().__init__(True, ALL)
        self.between = between
        self.found: Any = None

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = super().__call__(gm, inputs)
        self.found = self.between()
        return run


def _check_ours() -> None:
    assert any(name.startswith("__pygraph_parameters") for name in _code(Model.forward).co_names)


def test_another_backends_program_within_ours_is_as_always(plain: str) -> None:
    torch._dynamo.reset()
    backend = _Around(_compile_other)
    model = Model()
    torch.testing.assert_close(torch.compile(model, backend=backend)(X), model(X))
    assert backend.found == plain
    _check_ours()


def test_ours_within_another_backends(plain: str) -> None:
    class Outer(Backend):
        def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            run = super().__call__(gm, inputs)
            model = Model()
            compiled = torch.compile(model, backend=ReducingBackend(True, ALL))
            torch.testing.assert_close(compiled(X), model(X))
            return run

    torch._dynamo.reset()
    model = Other()
    torch.testing.assert_close(torch.compile(model, backend=Outer())(X), model(X))
    assert _described(Other.forward) == plain
    _check_ours()


def test_another_backends_program_in_another_thread_after_ours(plain: str) -> None:
    """Something of ours stays pending, as a lazy backward in another thread."""
    torch._dynamo.reset()
    found: list[str] = []
    handler = torch._dynamo.callback.callback_handler
    trigger = torch._dynamo.callback.CallbackTrigger.LAZY_BACKWARD
    with handler.install_callbacks(trigger, "0/0"):
        model = Model()
        torch.testing.assert_close(
            torch.compile(model, backend=ReducingBackend(True, ALL))(X), model(X)
        )
        thread = threading.Thread(target=lambda: found.append(_compile_other()))
        thread.start()
        thread.join()
    assert found == [plain]
    _check_ours()


def test_another_backends_program_after_ours_has_failed(plain: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="injected"):
        torch.compile(Model(), backend=_Around(_fails))(X)
    assert _compile_other() == plain


def test_after_a_graph_break_each_graph_is_changed() -> None:
    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    torch._dynamo.reset()
    model, backend = Broken(), ReducingBackend(True, ALL)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), model(X))
    assert backend.graphs == 2
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(X), model(X))


def test_graphs_that_the_backend_makes_itself_change_nothing(plain: str) -> None:
    """A part of a program, as DistributedDataParallel's, or a program of its own."""

    class Splits(Backend):
        def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            call_overhead.reduce(torch.fx.symbolic_trace(lambda x: x + 1), level=ALL)
            return super().__call__(gm, inputs)

    torch._dynamo.reset()
    model = Other()
    torch.testing.assert_close(torch.compile(model, backend=Splits())(X), model(X))
    assert _described(Other.forward) == plain


def test_without_patches_a_program_is_dynamos(plain: str) -> None:
    torch._dynamo.reset()
    model = Other()
    torch.compile(model, backend=ReducingBackend(True, NONE))(X)
    assert _described(Other.forward) == plain


def test_without_patches_calls_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_call.install()

    def is_ours(**asked: Any) -> bool:
        compiled = torch.compile(lambda x: x + 1, backend="pygraph", **asked)
        return hasattr(compiled, "_pygraph_compiled_call")

    assert is_ours()
    assert not is_ours(options={"pygraph.patches": NONE})
    monkeypatch.setenv("PYGRAPH_PATCHES", NONE)
    assert not is_ours()
    assert is_ours(options={"pygraph.patches": EXACT})


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(**asked: Any) -> str:
        return options.parse(
            None, {f"pygraph.{name}": value for name, value in asked.items()}
        ).own.patches

    assert parsed() == EXACT
    assert [parsed(patches=level) for level in LEVELS] == list(LEVELS)
    with pytest.raises(ValueError, match=r"'pygraph.patches' takes none, exact, all; got 'some'"):
        parsed(patches="some")
    monkeypatch.setenv("PYGRAPH_PATCHES", "all")
    assert parsed() == ALL
    monkeypatch.setenv("PYGRAPH_PATCHES", "some")
    with pytest.raises(ValueError, match="PYGRAPH_PATCHES takes"):
        parsed()


def test_levels() -> None:
    assert [Changes(level).goes_on for level in LEVELS] == [False, True, True]
    assert [Changes(level).misses_some for level in LEVELS] == [False, False, True]


def _replace_dict(model: Model) -> Any:
    kept = model.layers[1].__dict__
    model.layers[1].__dict__ = copy.deepcopy(Layer(7.0).__dict__)
    return kept


def _replace_class(model: Model) -> Any:
    class Negative(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    model.layers[1].__class__ = Negative


class _Computed(Layer):
    pass


def _give_property(model: Model) -> Any:
    model.layers[1].__class__ = _Computed
    found = {"weight": nn.Parameter(torch.full((3,), 8.0)), "bias": nn.Parameter(torch.ones(3))}
    _Computed._parameters = property(lambda self: found)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [_replace_dict, _replace_class, _give_property])
def test_whatever_full_guards_notice_is_noticed(change: Callable[[Model], Any]) -> None:
    """And nothing but that."""
    found = []
    with config.patch(use_recursive_dict_tags_for_guards=False):
        for reduces in (False, True):
            torch._dynamo.reset()
            model = Model()
            compiled = torch.compile(model, backend=ReducingBackend(reduces))
            for _ in range(3):
                torch.testing.assert_close(compiled(X), model(X))
            kept = change(model)
            try:
                found.append([torch.equal(compiled(X), model(X)) for _ in range(3)])
            finally:
                if "_parameters" in _Computed.__dict__:
                    del _Computed._parameters
            del kept
    assert found[0] == found[1]
    assert all(found[0]) or change is _give_property  # whose class was seen to have none


def test_threads_compile_and_call_at_once() -> None:
    torch._dynamo.reset()
    errors: list[BaseException] = []
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            gate.wait()
            for turn in range(3):
                model = (Model, Other)[(number + turn) % 2]()
                backend = ReducingBackend(number % 2 == 0, (EXACT, ALL)[turn % 2])
                compiled = torch.compile(model, backend=backend)
                for value in (1.0, 2.0):
                    torch.testing.assert_close(compiled(X), model(X))
                    model.layers[turn] = Layer(value)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    eval_frame._in_optimized_module = False  # threads may leave another value; PyTorch's too


def test_what_is_replaced_for_the_process_is_known() -> None:
    call_overhead.reduce_for_process()
    assert guards.from_numpy is call_overhead._from_numpy
    assert torch._dynamo.utils.record_pregraph_bytecode_enter is call_overhead._enter_range
    assert torch._dynamo.utils.record_pregraph_bytecode_exit is call_overhead._exit_range
