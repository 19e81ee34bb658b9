"""Makes the call of a compiled function or module cheaper, up to Dynamo's guards.

The engine (bindings/torch_patches/compiled_call.h) does without Python what PyTorch's wrapper does in
the usual case, and leaves any other call to PyTorch. Only for programs of PyGraph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._dynamo import config, eval_frame

from pygraph import runtime
from pygraph.torch_patches import selection
from pygraph.torch_patches.state import note_failure

NAME = "compiled_call"

# From PyTorch 2.12 on, the wrapper counts compiled frames of a program that must be one graph.
_CALLS_FULL_GRAPHS = hasattr(eval_frame, "set_eval_frame_override")

_pytorchs_compile = eval_frame.OptimizeContext.__call__
_pytorchs_module_call = eval_frame.OptimizedModule.__call__


def apply() -> None:
    """For what is compiled from now on."""
    if eval_frame._maybe_set_eval_frame is not eval_frame.set_eval_frame:
        raise RuntimeError("this PyTorch asks a switch of its own before it turns Dynamo on")
    module_type: Any = eval_frame.OptimizedModule
    module_type.__call__ = runtime.engine().module_call(module_type, _pytorchs_module_call)
    context_type: Any = eval_frame.OptimizeContext
    context_type.__call__ = _compile


def _compile(context: eval_frame.OptimizeContext, function: Any) -> Any:
    """As OptimizeContext.__call__, which makes what ``torch.compile`` returns."""
    compiled = _pytorchs_compile(context, function)
    try:
        is_usual = (
            type(compiled) is types.FunctionType  # not a module, whose `forward` passed here before
            and len(context.enter_exit_hooks) == 1
            and context.error_on_graph_break is None
            and (_CALLS_FULL_GRAPHS or not context.fullgraph)
            and getattr(context, "_isolate_recompiles_id", -1) == -1  # from PyTorch 2.13 on
            and _is_ours(context)
        )
        return _cheaper(context, compiled) if is_usual else compiled
    except Exception as error:  # of a backend's attributes, too
        note_failure(NAME, error)
        return compiled


def _is_ours(context: eval_frame.OptimizeContext) -> bool:
    """Whether PyGraph's backend is to compile it, and may change how it is called."""
    request = eval_frame.innermost_backend(context.callback)
    try:
        is_ours = hasattr(getattr(request, "compiler_fn", request), "transforms_for")
        asked = (getattr(request, "kwargs", {}).get("options") or {}).get("pygraph.patches")
        names = selection.default() if asked is None else selection.parse("pygraph.patches", asked)
    except Exception:  # of another backend's attributes, or of a value that no option has
        return False
    return is_ours and NAME in names


def _cheaper(context: eval_frame.OptimizeContext, wrapper: Any) -> Callable[..., Any]:
    function = wrapper._torchdynamo_orig_callable
    owner = getattr(function, "__self__", None)
    is_module = isinstance(owner, torch.nn.Module) and function == owner.__call__
    call = runtime.engine().compiled_call(
        wrapper,
        function,
        owner if is_module else None,
        _Callback(context.callback),
        context.enter_exit_hooks,
        context.fullgraph,
        _raise_to_user,
    )

    @functools.wraps(wrapper)
    def compile_wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    eval_frame.skip_code(compile_wrapper.__code__)  # type: ignore[attr-defined]
    attributes = compile_wrapper.__dict__
    attributes["__wrapped__"] = function
    attributes["_torchdynamo_wrapper_id"] = id(compile_wrapper)
    attributes["_pygraph_compiled_call"] = call
    return compile_wrapper


class _Callback:
    """A callback of Dynamo's whose backend is found in one step instead of three.

    Dynamo walks from wrapper to wrapper at each call, to look for code that this backend has compiled.
    """

    __slots__ = ("_callback", "_torchdynamo_orig_backend")

    def __init__(self, callback: Callable[..., Any]) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = eval_frame.innermost_backend(callback)

    def __call__(self, *args: Any) -> Any:
        return self._callback(*args)


def _raise_to_user(error: BaseException) -> NoReturn:
    """As PyTorch's wrapper shows an exception of Dynamo's."""
    from torch._dynamo.exc import ShortenTraceback

    if isinstance(error, ShortenTraceback):
        raise error.remove_dynamo_frames() from None
    if config.verbose:
        raise error
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause.__cause__.with_traceback(None)
        cause = cause.__cause__
    raise error.with_traceback(None) from error.__cause__
