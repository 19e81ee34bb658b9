"""Makes what Dynamo does before each call cheaper, for programs that PyGraph compiles.

A replay takes 3 to 5 us; what Dynamo and autograd do before it takes from 10 to hundreds. Much of that
can be had for less, with the same result. :mod:`.compiled_call` makes the way to Dynamo's guards
shorter, :mod:`.guards` the guards, :mod:`.parameters` the loading of parameters; here, of the
compilation, are

    numbers              a NumPy number in a model is made a tensor up to four times per call: for two
                         guards, and twice to be passed. (Python's numbers, where they vary, once.) The
                         engine's ``as_tensor`` does it once to pass it, in a seventh of the time.
    being untraced       Dynamo calls what a backend returns through a function that turns Dynamo off
                         meanwhile. A graph that is one partition runs no Python, unless it runs
                         uncaptured, by a function that has been made so before.

and of the process, functions that are replaced by equal ones:

    the range            Dynamo brackets the code that loads a graph's arguments with a range for
                         profilers, at two calls of Python functions, profiler or not. Without a
                         profiler, the range is none.
    numbers in guards    the engine's ``as_tensor`` again, wherever no mode could see the difference.
    the module's flag    a generator-based context around each call of a compiled module sets a flag;
                         a class does the same in a third of the time.
    dead wrappers        torch.autograd.Function, which a training step's forward is, looks at each
                         argument for what a function transform may have left. Where none of them is
                         such a wrapper, the engine says so, 50 times as fast.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from typing import Any

import torch
import torch._functorch.utils as functorch_utils
from torch._dynamo import eval_frame, guards, symbolic_convert
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import ChainedSource, NumpyTensorSource

from pygraph import runtime
from pygraph.options import EXACT, NONE
from pygraph.source_digest import digest_of
from pygraph.torch_patches import guards as cheaper_guards
from pygraph.torch_patches import parameters
from pygraph.torch_patches.patches import Changes, note_failure
from pygraph.uncapturable import Compilation


def reduce(
    gm: torch.fx.GraphModule, compilation: Compilation | None = None, level: str = EXACT
) -> None:
    """Of the program that is being compiled in this thread, if one is. Never raises.

    gm: as Dynamo gave it to the backend, which is about to return.
    compilation: what the program's guards are to be of.
    level: see :class:`pygraph.torch_patches.patches.Changes`.
    """
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    output = translator.output if translator is not None else None
    if output is None or level == NONE or not _compiles(output, gm):
        return
    reduce_for_process()
    changes = Changes(level)
    with changes.trying("guards"):
        cheaper_guards.make_cheaper(output, changes, compilation)
    with changes.trying("the call of a graph"):
        _leave_untraced(output)
    # By their sources, Dynamo finds the arguments that a specialization is for.
    if output.shape_env.specializations:
        return
    with changes.trying("the loading of numbers"):
        for node in gm.graph.find_nodes(op="placeholder"):
            _load_cheaply(node.meta.get("grapharg"))
    with changes.trying("the loading of parameters"):
        parameters.load_at_once(gm, changes)


def _compiles(output: OutputGraph, gm: torch.fx.GraphModule) -> bool:
    """Whether a graph is that of the program being compiled, and not of one that is nested in it."""
    ours = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    theirs = output.graphargs
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def _leave_untraced(output: OutputGraph) -> None:
    """Lets the generated code call a whole graph's callable itself, instead of what Dynamo wraps around
    it. Dynamo installs that as a global of the code, by a method of the compilation's object."""
    compilation = weakref.ref(output)  # which owns what follows
    whole_graph = runtime.engine().WholeGraphCallable

    def install(name: str, value: Any) -> None:
        inner = None
        if type(value) is types.FunctionType:
            inner = value.__dict__.get("_torchdynamo_orig_callable")
        if type(inner) is whole_graph:
            value = inner
        owner = compilation()
        assert owner is not None
        type(owner).install_global_unsafe(owner, name, value)

    output.install_global_unsafe = install


_dynamos_from_numpy = guards.from_numpy


def _from_numpy(value: Any) -> Any:
    """As Dynamo's, which guards call with arrays and numbers, and with what takes their place. It lets
    modes see the call, such as that of a default device."""
    if isinstance(value, guards.np.generic) and not torch._C._len_torch_function_stack():
        return runtime.engine().as_tensor(value)
    return _dynamos_from_numpy(value)


@dataclasses.dataclass(frozen=True)
class _NumberSource(ChainedSource):  # type: ignore[misc]
    """A Python or NumPy number, loaded as a tensor. Only loaded: guards know its base."""

    engine: str  # its module's name

    @property
    def _name_template(self) -> str:
        return "___as_tensor({0})"

    def reconstruct(self, codegen: Any) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from(self.engine, "as_tensor"))
        codegen(self.base)
        codegen.extend_output(create_call_function(1, False))


def _load_cheaply(argument: Any) -> None:
    """Changes how the generated code loads a graph's argument, if that is a number."""
    if argument is None or not argument.pass_arg_as_tensor or argument.source is None:
        return
    source = argument.source
    if isinstance(source, NumpyTensorSource):
        source = source.base  # an array or a number
    argument.source = _NumberSource(source, runtime.engine().__name__)
    argument.pass_arg_as_tensor = False


_pytorchs_enter = dynamo_utils.record_pregraph_bytecode_enter
_pytorchs_exit = dynamo_utils.record_pregraph_bytecode_exit


def _enter_range() -> Any:
    """As Dynamo's, which makes a context that does nothing where nobody profiles."""
    return _pytorchs_enter() if torch.autograd.profiler._is_profiler_enabled else None


def _exit_range(context: Any) -> None:
    if context is not None:
        _pytorchs_exit(context)


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
    """As PyTorch's, which makes a new tuple, and which Dynamo can trace."""
    may_be_left = torch.compiler.is_compiling() or runtime.engine().has_transform_wrapper(args)
    return _pytorchs_unwrap(args) if may_be_left else args


# Of the source of what is replaced.
_DIGEST_OF_FLAG = "9b4257c4371859cd"
_DIGEST_OF_UNWRAP = "b602dde17a03fcfb"
_DIGEST_OF_RANGE = "1e2bd5010e9eaa5d"
_DIGEST_OF_FROM_NUMPY = "a327915aeefc2832"


_OF_PROCESS: tuple[Any, ...] = (
    *(_InOptimizedModule.__enter__, _InOptimizedModule.__exit__, _unwrap_dead_wrappers),
    *(_enter_range, _exit_range, _from_numpy),
)


def reduce_for_process() -> None:
    """For all programs of the process; nothing where PyTorch has another function than is known. Never
    raises, and may be called again."""
    for ours in _OF_PROCESS:  # frames of PyTorch's own are not traced either
        eval_frame.skip_code(ours.__code__)
    for replace in (_replace_flag, _replace_unwrap, _replace_range, _replace_from_numpy):
        try:
            replace()
        except Exception as error:
            note_failure(replace.__name__.removeprefix("_replace_"), error)


def _replace_flag() -> None:
    flag = getattr(eval_frame, "_set_in_optimized_module", None)
    if flag is not None and digest_of((flag,)) == _DIGEST_OF_FLAG:
        eval_frame._set_in_optimized_module = _InOptimizedModule


def _replace_unwrap() -> None:
    if digest_of((functorch_utils.unwrap_dead_wrappers,)) == _DIGEST_OF_UNWRAP:
        functorch_utils.unwrap_dead_wrappers = _unwrap_dead_wrappers


def _replace_range() -> None:
    dynamos = (
        dynamo_utils.record_pregraph_bytecode_enter,
        dynamo_utils.record_pregraph_bytecode_exit,
    )
    if digest_of(dynamos) != _DIGEST_OF_RANGE:
        return
    dynamo_utils.record_pregraph_bytecode_enter = _enter_range
    dynamo_utils.record_pregraph_bytecode_exit = _exit_range


def _replace_from_numpy() -> None:
    if digest_of((guards.from_numpy,)) == _DIGEST_OF_FROM_NUMPY:
        guards.from_numpy = _from_numpy
        guards._get_closure_vars()["___from_numpy"] = _from_numpy
