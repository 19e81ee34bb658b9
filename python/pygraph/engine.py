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

    class Engine(_engine.Module):
        """The type of an engine's module, as ``_engine.pyi`` declares it."""

        ArgumentForm = _engine.ArgumentForm
        CallObserver = _engine.CallObserver
        CapturedGraph = _engine.CapturedGraph
        DriverError = _engine.DriverError
        GivenAway = _engine.GivenAway
        GraphedCallable = _engine.GraphedCallable
        FreeObserver = _engine.FreeObserver
        FreshAccumulators = _engine.FreshAccumulators
        FollowedNumber = _engine.FollowedNumber
        HostWatch = _engine.HostWatch
        NotGivenAway = _engine.NotGivenAway
        NotRelocatable = _engine.NotRelocatable
        RecordingPair = _engine.RecordingPair
        State = _engine.State
        StorageExchange = _engine.StorageExchange
        StreamNotReady = _engine.StreamNotReady
        WholeGraphCallable = _engine.WholeGraphCallable
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
