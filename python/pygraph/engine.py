"""The C++ engine, typed: loaded at its first use, because there may be none for the installed PyTorch.

An engine fits one minor release of PyTorch, which its name has: ``_engine_2_15``. An installation has
one engine (built from source) or one per supported release (from a wheel).
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from pygraph import _engine

    class Engine:
        """The type of an engine's module, as ``_engine.pyi`` declares it."""

        ArgumentForm = _engine.ArgumentForm
        CallObserver = _engine.CallObserver
        CapturedGraph = _engine.CapturedGraph
        DriverError = _engine.DriverError
        GivenAway = _engine.GivenAway
        GraphedCallable = _engine.GraphedCallable
        FreeObserver = _engine.FreeObserver
        FreshAccumulators = _engine.FreshAccumulators
        HostWatch = _engine.HostWatch
        NotGivenAway = _engine.NotGivenAway
        NotRelocatable = _engine.NotRelocatable
        RecordingPair = _engine.RecordingPair
        State = _engine.State
        StorageExchange = _engine.StorageExchange
        StreamNotReady = _engine.StreamNotReady
        WholeGraphCallable = _engine.WholeGraphCallable
        add_graph = staticmethod(_engine.add_graph)
        add_uncaptured_decision = staticmethod(_engine.add_uncaptured_decision)
        are_operators_watched = staticmethod(_engine.are_operators_watched)
        argument_form = staticmethod(_engine.argument_form)
        as_tensor = staticmethod(_engine.as_tensor)
        built_for = _engine.built_for
        clear_decisions = staticmethod(_engine.clear_decisions)
        clear_gradients = staticmethod(_engine.clear_gradients)
        clear_waiting = staticmethod(_engine.clear_waiting)
        clear_uncaptured_decisions = staticmethod(_engine.clear_uncaptured_decisions)
        compiled_call = staticmethod(_engine.compiled_call)
        driver_version = staticmethod(_engine.driver_version)
        flat_tensor = staticmethod(_engine.flat_tensor)
        flat_tensors = staticmethod(_engine.flat_tensors)
        free_blas_workspaces = staticmethod(_engine.free_blas_workspaces)
        free_pool = staticmethod(_engine.free_pool)
        gradient_pattern = staticmethod(_engine.gradient_pattern)
        gradients_of = staticmethod(_engine.gradients_of)
        given_away = staticmethod(_engine.given_away)
        graphed_callable = staticmethod(_engine.graphed_callable)
        has_gradient_pattern = staticmethod(_engine.has_gradient_pattern)
        has_own_kernels = staticmethod(_engine.has_own_kernels)
        has_transform_wrapper = staticmethod(_engine.has_transform_wrapper)
        lead_gradients = staticmethod(_engine.lead_gradients)
        memory_of = staticmethod(_engine.memory_of)
        modes = staticmethod(_engine.modes)
        module_call = staticmethod(_engine.module_call)
        new_stream = staticmethod(_engine.new_stream)
        parameter_loader = staticmethod(_engine.parameter_loader)
        pause = staticmethod(_engine.pause)
        remove_graph = staticmethod(_engine.remove_graph)
        remove_saved_tensors_hooks = staticmethod(_engine.remove_saved_tensors_hooks)
        reroute_graph = staticmethod(_engine.reroute_graph)
        saved_hooks_guard = staticmethod(_engine.saved_hooks_guard)
        set_gradients = staticmethod(_engine.set_gradients)
        signature = staticmethod(_engine.signature)
        survey_graph = staticmethod(_engine.survey_graph)
        wait = staticmethod(_engine.wait)
        waiting_seconds = staticmethod(_engine.waiting_seconds)
        whole_graph_callable = staticmethod(_engine.whole_graph_callable)
        __file__: str
        __name__: str


_FOLDER = Path(__file__).parent


@functools.cache
def engine() -> Engine:
    """The C++ engine. Raises ImportError if the installation has none for the installed PyTorch."""
    file = _files().get(release())
    if file is None:
        built_for = " and ".join(_files()) or "no release"
        raise ImportError(_refusal(f"{_FOLDER} is built for PyTorch {built_for}"))
    found = importlib.import_module(f"pygraph.{file.name.split('.')[0]}")
    if found.built_for != release():  # by PyTorch's headers; the file's name is only a name
        raise ImportError(_refusal(f"{file} is built for PyTorch {found.built_for}"))
    return cast("Engine", found)


def release() -> str:
    """The installed release of PyTorch: "2.11"."""
    return ".".join(torch.__version__.split(".")[:2])


def _files() -> dict[str, Path]:
    """The engines for this Python, by release of PyTorch, the oldest first."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    files = {
        (int(found[1]), int(found[2])): path
        for path in _FOLDER.glob(f"_engine_*{suffix}")
        if (found := re.match(r"_engine_(\d+)_(\d+)\.", path.name)) is not None
    }
    return {f"{major}.{minor}": files[major, minor] for major, minor in sorted(files)}


def _refusal(what: str) -> str:
    return (
        f"PyGraph in {what}, this is {torch.__version__}: build it for this PyTorch "
        "(pip install --no-build-isolation . in its sources), or install a supported release"
    )
