"""``pygraph.explain``: how much of a program runs in graphs, and why the rest does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables.graphed import Graphed
from pygraph.report.explanation import Report, without_graphs

__all__ = ["Report", "explain"]


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Reports how much of ``model(*args, **kwargs)`` runs in graphs, and why the rest does not.

    On a GPU the model is compiled again and called until its graphs are selected, at most 100 times, so
    a model whose calls change it is changed. With gradients enabled, the backward of its results is
    included, and ``.grad`` stays as it is. Without a GPU the forward is traced on fake tensors: nothing
    runs, and counts are estimates.

    For the result of :func:`pygraph.graph`, such as a training step, new graphs of the function are
    made in the same way. Afterwards tensors, gradients, attributes, containers and random numbers are
    put back, so nothing has been trained. That needs memory for a copy of everything that the function
    reaches. What it prints or writes to files happens once per call. Without a GPU it is not called.

    Returns a :class:`~pygraph.report.explanation.Report`: print it, or ``save("report.html")``. Raises
    what the model raises.
    """
    if not callable(model):
        raise TypeError(f"pygraph.explain takes a callable, not {type(model).__name__}")
    program = type(model).__name__ if not hasattr(model, "__name__") else model.__name__
    reason = runtime.unavailable_reason()
    if isinstance(model, Graphed):
        if reason is not None:
            return without_graphs(program, reason)
        from pygraph.report.measure import measure_step

        return measure_step(program, model, args, kwargs)
    if reason is not None:
        from pygraph.report.estimate import estimate

        if torch.cuda.is_available():
            runtime.notice_once(f"only an estimate, as PyGraph uses no graphs here: {reason}")

        return estimate(program, model, args, kwargs)
    from pygraph.report.measure import measure

    return measure(program, model, args, kwargs)
