"""``pygraph.graph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pygraph import options
from pygraph.callables.graphed import Graphed


def graph(function: Callable[..., Any] | None = None, /, **chosen: Any) -> Any:
    """Makes a callable that uses CUDA graphs of everything that it does: a training step, or inference.

    ``function``: any callable; or none, as in ``@pygraph.graph(audit=100)``. It may take any arguments.
    Tensors may lie at other addresses in each call; each combination of other values (numbers, strings)
    has graphs of its own. Results are fresh memory in each call. The first calls run uncaptured and are
    observed. A graph is used after replays have given the same bits as uncaptured runs in three calls
    in a row, and if it is faster.

    A replay does not run the function's Python. So the function has no graph if its calls change
    anything on the host that PyGraph can see (``pygraph.stats()`` gives the reason), and a call is not
    replayed if a value that the function reads on the host has changed. PyGraph cannot see files,
    sockets, and state inside extensions.

    Gradients flow through the callable: if results require gradients, the backward gets graphs, too.
    Results whose backward is run inside the call are returned detached.

    Options are those of the backend without the prefix: ``select``, ``audit``, ``max_graphs``,
    ``lanes`` (1 by default), ``reuse_gradients``, ``record_capacity_gib``. With
    ``adapt_optimizers=True``, PyTorch's optimizers that count steps on the CPU are made capturable at
    the first call, and learning rates are tensors during calls, which rounds differently. Raises
    ValueError for an unknown option or value, and TypeError if ``function`` is not callable. Without a
    GPU, and in every case that PyGraph does not understand, the function is called as it is.

    The result may be called from several threads. While it records, no other thread may use the same
    tensors elsewhere. docs/explanation/whole-steps.md explains how it works.
    """
    own = ("select", "audit", "max_graphs", "lanes", "reuse_gradients", "record_capacity_gib")
    allowed = (*own, "adapt_optimizers")
    unknown = [name for name in chosen if name not in allowed]
    if unknown:
        raise ValueError(
            f"unknown option {unknown[0]!r} of pygraph.graph; it has: {', '.join(allowed)}"
        )
    adapts = chosen.pop("adapt_optimizers", False)
    if not isinstance(adapts, bool):
        raise ValueError(f"option 'adapt_optimizers' of pygraph.graph takes a bool, got {adapts!r}")
    parsed = options.own({"lanes": 1} | chosen)
    if function is None:
        return lambda given: Graphed(given, parsed, adapts)
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(Graphed(function.__func__, parsed, adapts))
    if not callable(function):
        raise TypeError(f"pygraph.graph takes a callable, not {type(function).__name__}")
    return Graphed(function, parsed, adapts)
