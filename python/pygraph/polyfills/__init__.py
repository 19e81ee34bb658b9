"""Library functions that read the GPU's memory in a loop, replaced by equal ones that do not
(docs/explanation/transformations.md, ``library_functions``). Dynamo traces them in place of the
library's (``torch.compiler.substitute_in_graph``). Each is

    equal      to what its library computes, but for the rounding of a sum that the compiler may fuse
               either way; a test compares them
    pinned     to the source that it replaces: where a version of the library has another, nothing is
               replaced
    ours only  other backends trace the library's function, in the same process too; what runs outside
               of compiled programs is never touched
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext

from pygraph import dynamo_program, observations
from pygraph.observations import Applied
from pygraph.options import LIBRARY_FUNCTIONS
from pygraph.runtime import log
from pygraph.torch_patches.stored_digests import StoredDigests

# Library's module, and ours that has `replace`, which is called once the library's has been imported.
_MODULES = {
    "torchvision.models.detection.roi_heads": "pygraph.polyfills.torchvision_masks",
    "torchvision.ops.poolers": "pygraph.polyfills.torchvision_pooling",
}

_OURS = os.path.dirname(__file__)

_seen: set[str] = set()


def register() -> None:
    """Registers with Dynamo the polyfills of all libraries that have been imported by now.

    Never raises. A library that lacks the replaced function, or whose function has already been
    replaced by others, keeps its own.
    """
    for library, ours in _MODULES.items():
        if library in sys.modules and library not in _seen:
            _seen.add(library)
            try:
                importlib.import_module(ours).replace(sys.modules[library])
            except Exception as error:
                log.info("%s is kept as it is: %s", library, error)


def substitute(
    original: types.FunctionType, sources: tuple[Callable[..., Any], ...], digests: tuple[str, ...]
) -> Callable[[Callable[..., Any]], None]:
    """Decorates the function that Dynamo traces in place of ``original`` when PyGraph compiles.

    The function may return NotImplemented, while it is traced, to have the original traced.
    sources: the functions that it replaces. digests: of their known sources, by
    :func:`pygraph.source_digest.digest_of`.
    """

    def decorate(ours: Callable[..., Any]) -> None:
        stored = StoredDigests(f"{original.__module__}.{original.__qualname__}")
        found = stored.digest_of(*sources)
        stored.save()
        if found not in digests:
            log.info("%s has another source than known (%s): kept", original.__qualname__, found)
            return
        what = f"{original.__module__}.{original.__qualname__} written without reads of the GPU"
        # Dynamo knows the original by its identity and would replace it within itself, too.
        unknown_to_dynamo = types.FunctionType(
            original.__code__,
            original.__globals__,
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if _is_wanted():
                result = ours(*args, **kwargs)
                if result is not NotImplemented and _note(what):
                    return result
            return unknown_to_dynamo(*args, **kwargs)

        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(chosen)

    return decorate


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_wanted() -> bool:
    """Whether the compiler that Dynamo traces for wants polyfills; called while it traces."""
    compiler, arguments = dynamo_program.requested_compiler()
    transforms_for = getattr(compiler, "transforms_for", None)
    return transforms_for is not None and LIBRARY_FUNCTIONS in transforms_for(**arguments)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _note(what: str) -> bool:
    """Notes for the report and the log that a polyfill was traced."""
    stack = TracingContext.extract_stack()
    frames = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    log.info("%s: %s (%s)", LIBRARY_FUNCTIONS, what, where or "unknown line")
    observation = observations.current()
    if observation is not None:
        observation.note_applied(Applied(LIBRARY_FUNCTIONS, what, where))
    return True
