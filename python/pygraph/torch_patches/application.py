"""Applies the patches: those of the process once, those of a compilation to each program, and those on
demand when a part of PyGraph first needs them (:class:`.table.Patch`). Those of a compilation change
objects that belong to it; no other compilation sees them, be it around this one, within it, or in
another thread.

An error in a patch never reaches the program: it is logged once, and PyTorch's own way is taken.
"""

from __future__ import annotations

import contextlib
import importlib
import threading

import torch

from pygraph import dynamo_program, runtime
from pygraph.torch_patches import selection, sources, state
from pygraph.torch_patches.state import Attempt
from pygraph.torch_patches.table import PATCHES, REQUIRED, Patch

_lock = threading.RLock()


def install(names: frozenset[str] | None = None) -> None:
    """Applies patches of the process: the required ones, and others. Never raises. Thread-safe, and may
    be called again.

    To be called before ``torch.compile`` wraps a program, for its calls to be cheaper.
    names: of patches; those that are wanted by default, unless given.
    """
    with Attempt("what is replaced for the process").trying(), contextlib.suppress(ImportError):
        wanted = _default() if names is None else names
        state.note_asked_for(wanted)
        runtime.engine()  # raises ImportError, which the backend tells the user when it is called
        with _lock:
            for patch in (*REQUIRED, *PATCHES):
                is_wanted = patch in REQUIRED or patch.name in wanted
                if patch.scope == "process" and is_wanted and state.is_first_attempt(patch):
                    _apply(patch, Attempt(patch.name))


def provide(name: str) -> str:
    """Applies a patch on demand. Never raises. Thread-safe, and may be called again.

    name: of a patch that the program asks for, or of a required one.
    Returns why PyTorch's own function is in place; empty where it is replaced.
    """
    (patch,) = (patch for patch in (*PATCHES, *REQUIRED) if patch.name == name)
    with _lock:
        if state.is_first_attempt(patch):
            _apply(patch, Attempt(name))
    return state.why_not_used(patch)


def apply(gm: torch.fx.GraphModule, names: frozenset[str]) -> None:
    """Applies patches to the program that Dynamo is compiling in this thread. Never raises.

    gm: as Dynamo gave it to the backend, which is about to return. Where it is another graph, such as a
        part of the program, only patches of the process are applied.
    names: of the patches that the program asks for.
    """
    install(names)
    with Attempt("what is replaced for a program").trying():
        output = dynamo_program.current_with(gm)
        if output is None:
            return
        for patch in PATCHES:
            if patch.scope == "compilation" and patch.name in names:
                attempt = Attempt(patch.name)
                _apply(patch, attempt, gm, output, attempt)
        state.log_once()


def _apply(patch: Patch, attempt: Attempt, *args: object) -> None:
    with attempt.trying():
        if sources.why_not(patch):  # as status() says
            return
        module, name = patch.apply.split(":")
        getattr(importlib.import_module(module), name)(*args)
        state.note_used(patch)


def _default() -> frozenset[str]:
    try:
        return selection.default()
    except ValueError:  # which the first compilation raises
        return frozenset()
