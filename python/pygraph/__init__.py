"""PyGraph: CUDA Graphs for PyTorch programs, without changes to the program.

``torch.compile(model, backend="pygraph")`` is all a program needs; it need not import this package. The
functions here inspect and reset: :func:`explain` reports how much of a program runs in graphs and why
the rest does not, :func:`stats` returns the state of each graph, :func:`status` lists which functions
of PyTorch are replaced, :func:`reset` drops all graphs and releases their memory, and in the context
:func:`uncaptured` no graph is used. :func:`graph` makes one graph of any callable, such as a whole
training step, and :func:`check` compares a step with and without its graph.

The names are loaded at their first use: ``python -m pygraph script.py`` must not import PyTorch before
the script does, which may set environment variables first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pygraph._version import __version__

if TYPE_CHECKING:
    from pygraph.callables.check import Check, check
    from pygraph.callables.graph import graph
    from pygraph.report import Report, explain
    from pygraph.report.stats import GraphStats, stats
    from pygraph.runtime import reset, uncaptured
    from pygraph.torch_patches import PatchStatus, Status, status

__all__ = [
    "Check",
    "GraphStats",
    "PatchStatus",
    "Report",
    "Status",
    "__version__",
    "check",
    "explain",
    "graph",
    "reset",
    "stats",
    "status",
    "uncaptured",
]

_MODULES = {
    "Check": "callables.check",
    "GraphStats": "report.stats",
    "PatchStatus": "torch_patches",
    "Report": "report",
    "Status": "torch_patches",
    "check": "callables.check",
    "explain": "report",
    "graph": "callables.graph",
    "reset": "runtime",
    "stats": "report.stats",
    "status": "torch_patches",
    "uncaptured": "runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
