"""Questions about the program that Dynamo is compiling in this thread, and what it is told.

Nothing of PyTorch is replaced here. Dynamo has no public interface for these questions, and features
depend on the answers, so they cannot be switched off like patches (:mod:`pygraph.torch_patches`). They
are in one place because another release of PyTorch may need other code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo import config, eval_frame, guards, source, symbolic_convert


def current() -> Any:
    """Dynamo's OutputGraph of the program; None if Dynamo compiles nothing in this thread."""
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    return translator.output if translator is not None else None


def current_with(gm: torch.fx.GraphModule) -> Any:
    """As `current`, if gm is the program's whole graph, and not a part of it or of a nested program."""
    output = current()
    if output is None:
        return None
    ours = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    theirs = output.graphargs
    is_whole = len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
    return output if is_whole else None


def code() -> types.CodeType | None:
    """The code of the function that is being compiled; None if Dynamo compiles nothing in this
    thread."""
    output = current()
    return output.root_tx.f_code if output is not None else None


def requested_compiler() -> tuple[Any, Mapping[str, Any]]:
    """The backend that is to compile the program, and the arguments that it will be called with.

    Raises AttributeError if Dynamo compiles nothing in this thread.
    """
    output = current()
    request = eval_frame.innermost_backend(output.compiler_fn if output is not None else None)
    # torch.compile keeps the backend's options beside it.
    return getattr(request, "compiler_fn", request), getattr(request, "kwargs", {})


def is_stored(output: Any) -> bool:
    """Whether the program's guards and code are written to a file, for other processes."""
    return bool(output.package is not None or output.export or config.caching_precompile)


def add_guard(output: Any, state: Any, attribute: str) -> None:
    """Adds a guard that compiles the program again at the first call after an attribute, a bool, has
    changed.

    The guard is Dynamo's own for a constant. output: of the program that is being compiled, whose
    guards are not made yet.
    """
    name = output.install_global_by_id("__pygraph_program", state)
    guarded = source.AttrSource(source.GlobalSource(name), attribute)
    guards.install_guard(guarded.make_guard(guards.GuardBuilder.CONSTANT_MATCH))


def allows_recompilation(function: types.CodeType, left: int) -> bool:
    """Whether recompilation is allowed now, and Dynamo's limit leaves at least ``left`` more
    compilations of the function."""
    if config.error_on_recompile or eval_frame._stance.stance != "default":
        return False
    compiled = eval_frame._debug_get_cache_entry_list(function)
    return bool(len(compiled) + left <= config.recompile_limit)


def leave_alone(function: Callable[..., Any]) -> None:
    """Dynamo never compiles the function, also where it takes over from code that it has compiled."""
    eval_frame.skip_code(function.__code__)
