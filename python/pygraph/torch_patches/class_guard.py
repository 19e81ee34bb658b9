"""Guards attributes of modules' classes once per class, and not through each module, so that Dynamo can
skip the modules (docs/explanation/before-each-call.md).

A module whose ``__class__`` or ``__dict__`` is replaced in place is not noticed.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from typing import Any

import torch
from torch._dynamo import guards
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import (
    AttrSource,
    CellContentsSource,
    ClosureSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    TypeDictSource,
    TypeMROSource,
    TypeSource,
)
from torch._guards import Guard, Source

from pygraph.torch_patches.guards import make_by
from pygraph.torch_patches.state import Attempt

# What may be guarded by way of a class: values of these types, by these guards, found in these ways.
# Other guards know values by their source, as that of a tensor does.
_BY_CLASS = {
    "CLOSURE_MATCH": (types.FunctionType,),
    "CONSTANT_MATCH": (bool, int, float, str, type(None)),
}
_LINKS = (
    *(AttrSource, CellContentsSource, ClosureSource, DictGetItemSource, GetItemSource),
    *(TypeDictSource, TypeMROSource),
)


def apply(gm: torch.fx.GraphModule, output: Any, attempt: Attempt) -> None:
    for kind in _BY_CLASS:
        make_by(output, kind, functools.partial(_make, weakref.ref(output), kind), attempt)


def _make(
    output: weakref.ref[OutputGraph], kind: str, builder: guards.GuardBuilder, guard: Guard
) -> bool:
    """The guard of the same attribute of a module's class, as something that all its modules share."""
    chain: list[Any] = [guard.originating_source]
    while type(chain[-1]) in _LINKS:
        chain.append(chain[-1].base)
    to_class, graph = chain.pop(), output()
    if not chain or type(to_class) is not TypeSource or graph is None:
        return False
    module = builder.get(to_class.base)
    if not isinstance(module, torch.nn.Module) or type(builder.get(guard)) not in _BY_CLASS[kind]:
        return False
    name = graph.install_global_by_id("__pygraph_class", type(module))
    source: Source = GlobalSource(name)
    for link in reversed(chain):
        source = dataclasses.replace(link, base=source)
    builder.TYPE_MATCH(Guard(to_class.base, guards.GuardBuilder.TYPE_MATCH))
    dynamos = getattr(guards.GuardBuilder, kind)
    dynamos(builder, dataclasses.replace(guard, originating_source=source, create_fn=dynamos))
    return True
