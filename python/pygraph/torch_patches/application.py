"""Applies the patches: those of the process once, those of a compilation to each program.

Patches of a *compilation* change objects that belong to it: its guards, its graph's arguments, its
OutputGraph. They are gone with these objects; no other compilation sees them, be it around this one,
within it, or in another thread. Patches of the *process* replace a function by an equal one, which
gives the same result for every program of every backend, and stay.

An error in a patch never reaches the program: it is logged once, and PyTorch's own way is taken.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch

from pygraph import dynamo_program, runtime
from pygraph.torch_patches import selection, sources, state
from pygraph.torch_patches.state import Attempt
from pygraph.torch_patches.table import PATCHES, Patch

_lock = threading.RLock()
_tried: set[str] = set()  # patches of the process


def install() -> None:
    """Applies the patches of the process that are wanted by default. Never raises.

    To be called before ``torch.compile`` wraps a program, for its calls to be cheaper. May be called
    again.
    """
    try:
        names = selection.default()
    except ValueError:  # which the first compilation raises
        return
    _apply_to_process(names)


def apply(gm: torch.fx.GraphModule, names: frozenset[str]) -> None:
    """Applies patches to the program that Dynamo is compiling in this thread. Never raises.

    gm: as Dynamo gave it to the backend, which is about to return. Where it is another graph, such as a
        part of the program, only patches of the process are applied.
    names: of the patches that the program asks for.
    """
    _apply_to_process(names)
    attempt = Attempt("the compilation's object")
    with attempt.trying():
        output = dynamo_program.current_with(gm)
        if output is not None:
            _apply_to_program(gm, output, names)
            state.log_once()


def _apply_to_program(gm: torch.fx.GraphModule, output: Any, names: frozenset[str]) -> None:
    for patch in PATCHES:
        if patch.scope == "compilation" and patch.name in names and _fits(patch):
            attempt = Attempt(patch.name)
            with attempt.trying():
                _function(patch)(gm, output, attempt)
                state.note_used(patch)


def _apply_to_process(names: frozenset[str]) -> None:
    state.note_asked_for(names)
    try:
        runtime.engine()
    except ImportError:  # the backend says so when it is called
        return
    with _lock:
        for patch in PATCHES:
            if patch.scope == "process" and patch.name in names and patch.name not in _tried:
                _tried.add(patch.name)
                attempt = Attempt(patch.name)
                with attempt.trying():
                    if _fits(patch):
                        _function(patch)()
                        state.note_used(patch)


def _fits(patch: Patch) -> bool:
    return not sources.why_not(patch)


def _function(patch: Patch) -> Any:
    module, name = patch.apply.split(":")
    return getattr(importlib.import_module(module), name)
