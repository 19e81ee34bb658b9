"""Makes what Dynamo does before each call cheaper, for programs that PyGraph compiles.

A replay takes 3 to 5 us; what Dynamo and autograd do before it takes from 10 to hundreds. Much of that
can be had for less, with the same result. :mod:`pygraph.compiled_call` makes the way to Dynamo's guards
shorter, :mod:`pygraph.guards` the guards, :mod:`pygraph.parameters` the loading of parameters; here are

    the range            Dynamo brackets the code that loads a graph's arguments with a range for
                         profilers, at two calls of Python functions, profiler or not. It is left out.
    numbers              a NumPy number in a model is made a tensor up to four times per call: for two
                         guards, and twice to be passed. (Python's numbers, where they vary, once.) The
                         engine's ``as_tensor`` does it once to pass it, in a seventh of the time.
    the module's flag    a generator-based context around each call of a compiled module sets a flag;
                         a class does the same in a third of the time.
    dead wrappers        torch.autograd.Function, which a training step's forward is, looks at each
                         argument for what a function transform may have left. Where none of them is
                         such a wrapper, the engine says so, 50 times as fast.

    being untraced       Dynamo calls what a backend returns through a function that turns Dynamo off
                         meanwhile. A graph that is one partition runs no Python, unless it runs
                         uncaptured, by a function that has been made so before.

The first two and the last are settings of the compilation that is going on, changed when the backend
is done, before Dynamo generates code and guards, and set back at the compilation's end: other backends'
programs are as always. The others are functions of PyTorch's, replaced for the process by equal ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.utils as functorch_utils
from torch._dynamo import decorators, eval_frame, guards
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.source import ChainedSource, NumpyTensorSource
from torch._guards import CompileContext

from pygraph import guards as cheaper_guards
from pygraph import parameters, runtime
from pygraph.learned_cuts import Compilation
from pygraph.substitutes import digest_of

_dynamos_from_numpy = guards.from_numpy
_is_left_out = False  # whether the range's setting is to be set back; Dynamo compiles under one lock


def reduce(gm: torch.fx.GraphModule, compilation: Compilation | None = None) -> None:
    """Of the program that is being compiled, if one is. gm: as Dynamo gave it to the backend.

    compilation: what the program's guards are to be of.
    """
    global _is_left_out
    if CompileContext.current_compile_id() is None:
        return
    if _set_back not in callback_handler.end_callbacks:  # torch._dynamo.reset() removes it
        callback_handler.register_end_callback(_set_back)
    if dynamo_config.record_runtime_overhead:
        dynamo_config.record_runtime_overhead = False
        _is_left_out = True
    decorators.DisableContext = _DisableContext
    cheaper_guards.make_cheaper(compilation)
    as_tensor = runtime.engine().as_tensor
    guards.from_numpy = _from_numpy
    guards._CLOSURE_VARS = {
        **guards._get_closure_vars(),
        "___from_numpy": _from_numpy,
        "___as_tensor": as_tensor,
    }
    for node in gm.graph.find_nodes(op="placeholder"):
        _load_cheaply(node.meta.get("grapharg"))
    parameters.load_at_once(gm)


def _set_back(_: CallbackArgs) -> None:
    global _is_left_out
    decorators.DisableContext = eval_frame.DisableContext
    cheaper_guards.set_back()
    guards.from_numpy = _dynamos_from_numpy
    guards._CLOSURE_VARS = None  # made anew where it is needed
    if _is_left_out:
        dynamo_config.record_runtime_overhead = True
        _is_left_out = False


class _DisableContext(eval_frame.DisableContext):  # type: ignore[misc]
    """As Dynamo's, which ``disable`` puts around what a backend returned."""

    def __call__(self, function: Any) -> Any:
        if type(function) is runtime.engine().WholeGraphCallable:
            return function
        return super().__call__(function)


def _from_numpy(value: Any) -> Any:
    """As Dynamo's, which guards call with arrays and numbers, and with what takes their place."""
    if isinstance(value, guards.np.generic) and not torch._C._len_torch_function_stack():
        return runtime.engine().as_tensor(value)
    return _dynamos_from_numpy(value)


@dataclasses.dataclass(frozen=True)
class _NumberSource(ChainedSource):  # type: ignore[misc]
    """A Python or NumPy number, loaded as a tensor. Only loaded: guards know its base."""

    @property
    def _name_template(self) -> str:
        return "___as_tensor({0})"

    def reconstruct(self, codegen: Any) -> None:
        engine = runtime.engine().__name__
        codegen.add_push_null(lambda: codegen.load_import_from(engine, "as_tensor"))
        codegen(self.base)
        codegen.extend_output(create_call_function(1, False))


def _load_cheaply(argument: Any) -> None:
    """Changes how the generated code loads a graph's argument, if that is a number."""
    if argument is None or not argument.pass_arg_as_tensor or argument.source is None:
        return
    source = argument.source
    if isinstance(source, NumpyTensorSource):
        source = source.base  # an array or a number
    argument.source = _NumberSource(source)
    argument.pass_arg_as_tensor = False


class _InOptimizedModule:
    """As torch._dynamo.eval_frame._set_in_optimized_module."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = eval_frame._in_optimized_module
        eval_frame._in_optimized_module = True

    def __exit__(self, *_: object) -> None:
        eval_frame._in_optimized_module = self._before


_pytorchs_unwrap = functorch_utils.unwrap_dead_wrappers


def _unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """As PyTorch's, which makes a new tuple."""
    return _pytorchs_unwrap(args) if runtime.engine().has_transform_wrapper(args) else args


# Of the source of what is replaced.
_DIGEST_OF_FLAG = "9b4257c4371859cd"
_DIGEST_OF_UNWRAP = "b602dde17a03fcfb"


def reduce_for_process() -> None:
    """For all programs of the process; nothing where PyTorch has another function than is known."""
    flag = getattr(eval_frame, "_set_in_optimized_module", None)
    if flag is not None and digest_of((flag,)) == _DIGEST_OF_FLAG:
        eval_frame._set_in_optimized_module = _InOptimizedModule
    if digest_of((functorch_utils.unwrap_dead_wrappers,)) == _DIGEST_OF_UNWRAP:
        functorch_utils.unwrap_dead_wrappers = _unwrap_dead_wrappers
