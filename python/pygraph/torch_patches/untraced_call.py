"""Calls a graph that is one partition without Dynamo's wrapper, which turns Dynamo off meanwhile: a
replay runs no Python, and the function of an uncaptured run turns Dynamo off itself.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch

from pygraph import runtime
from pygraph.torch_patches.state import Attempt


def apply(gm: torch.fx.GraphModule, output: Any, attempt: Attempt) -> None:
    """Dynamo installs what it calls as a global of the code, by a method of the OutputGraph."""
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
