"""The C++ engine, typed: loaded at its first use, because it may not fit the installed PyTorch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from pygraph import _engine

    class Engine:
        """The module :mod:`pygraph._engine` as a type, which Python has none for."""

        CapturedGraph = _engine.CapturedGraph
        DriverError = _engine.DriverError
        GivenAway = _engine.GivenAway
        GraphedCallable = _engine.GraphedCallable
        FreeObserver = _engine.FreeObserver
        NotGivenAway = _engine.NotGivenAway
        NotRelocatable = _engine.NotRelocatable
        RecordingPair = _engine.RecordingPair
        StreamNotReady = _engine.StreamNotReady
        WholeGraphCallable = _engine.WholeGraphCallable
        add_graph = staticmethod(_engine.add_graph)
        add_uncaptured_decision = staticmethod(_engine.add_uncaptured_decision)
        as_tensor = staticmethod(_engine.as_tensor)
        clear_decisions = staticmethod(_engine.clear_decisions)
        clear_waiting = staticmethod(_engine.clear_waiting)
        clear_uncaptured_decisions = staticmethod(_engine.clear_uncaptured_decisions)
        compiled_call = staticmethod(_engine.compiled_call)
        driver_version = staticmethod(_engine.driver_version)
        free_blas_workspaces = staticmethod(_engine.free_blas_workspaces)
        free_pool = staticmethod(_engine.free_pool)
        given_away = staticmethod(_engine.given_away)
        graphed_callable = staticmethod(_engine.graphed_callable)
        has_transform_wrapper = staticmethod(_engine.has_transform_wrapper)
        memory_of = staticmethod(_engine.memory_of)
        module_call = staticmethod(_engine.module_call)
        new_stream = staticmethod(_engine.new_stream)
        parameter_loader = staticmethod(_engine.parameter_loader)
        pause = staticmethod(_engine.pause)
        remove_graph = staticmethod(_engine.remove_graph)
        saved_hooks_guard = staticmethod(_engine.saved_hooks_guard)
        signature = staticmethod(_engine.signature)
        wait = staticmethod(_engine.wait)
        waiting_seconds = staticmethod(_engine.waiting_seconds)
        whole_graph_callable = staticmethod(_engine.whole_graph_callable)
        __file__: str
        __name__: str


_SUPPORTED_TORCH = "2.11"


@functools.cache
def engine() -> Engine:
    """The C++ engine. Raises ImportError where it does not fit the installed PyTorch."""
    if not torch.__version__.startswith(_SUPPORTED_TORCH + "."):
        raise ImportError(
            f"PyGraph is built for PyTorch {_SUPPORTED_TORCH}, this is {torch.__version__}"
        )
    from pygraph import _engine

    return cast("Engine", _engine)
