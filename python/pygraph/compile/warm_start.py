"""Warm starts: a program from AOTAutograd's cache gets its partitions, too.

On a hit AOTAutograd calls no compiler: it loads the compiled graphs of forward and backward from
Inductor's cache and wraps them. Loading passes through ``wrap_post_compile`` of the cache's entry; in
the context :func:`attaching`, what is loaded there is handed to PyGraph before it is wrapped, and
PyTorch's own graph runtime stays off. The method is replaced as a patch of PyTorch (``warm_start`` in
:mod:`pygraph.torch_patches.table`).

What PyGraph needs to know of a graph, and learns from its FX graph when it is compiled, is in a file of
its own beside Inductor's cache (:class:`Facts`), by the graph's key there. An entry without that file,
and any error, counts as a miss: PyTorch then compiles, as with an empty cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pygraph import stored
from pygraph.runtime import log

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a graph that Inductor compiled and that its compiled code does not contain.

    on_host: inputs that an uncaptured run needs on the CPU (:class:`PartitionInfo`).
    """

    input_count: int
    on_host: frozenset[int] = frozenset()


# Called with a loaded graph, its facts, and AOTAutograd's metadata of the program.
Attach = Callable[[Any, Facts, Any], None]

_attach: ContextVar[Attach | None] = ContextVar("pygraph_attach", default=None)


def is_wanted_by_user() -> bool:
    """Whether PyTorch's settings let AOTAutograd use its cache, in the form that is known here, a
    miss is no error, and no other rank waits for it."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    is_bundled = functorch_config.bundled_autograd_cache or dynamo_config.caching_precompile
    is_strict = functorch_config.strict_autograd_cache
    is_strict |= getattr(dynamo_config, "strict_precompile", False)  # not in all releases
    # Ranks that wait for each other in the compiler must all ask the cache, or none. Whether a program
    # may be loaded (pygraph.compile.warm_programs) is each rank's own answer.
    waits = ("_sync_decision_cross_ranks", "_sync_cache_decision_cross_ranks")
    is_synchronized = any(getattr(functorch_config, name, False) for name in waits)
    is_on = bool(functorch_config.enable_autograd_cache)
    return is_on and not (is_bundled or is_strict or is_synchronized)


@contextlib.contextmanager
def attaching(attach: Attach) -> Iterator[None]:
    """A context in which graphs that AOTAutograd loads in this thread are passed to ``attach``. An
    error in ``attach`` counts as a miss."""
    token = _attach.set(attach)
    try:
        yield
    finally:
        _attach.reset(token)


def keep(key: str | None, facts: Facts) -> None:
    """Writes the facts of the graph with that key in Inductor's cache, unless they are there."""
    if not key:
        return
    with contextlib.suppress(Exception):
        if find(key) == facts:
            return
    try:
        data = {"key": key, "input_count": facts.input_count, "on_host": sorted(facts.on_host)}
        stored.write(_path(key), data)
    except Exception as error:  # the folder cannot be written
        log.debug("no warm start for a graph: %s", error)


def find(key: str) -> Facts:
    """Reads the facts of a graph. Raises if there are none, or none that can be read."""
    data = stored.read(_path(key))
    if data["key"] != key:
        raise ValueError("the facts are another graph's")
    input_count, on_host = data["input_count"], data["on_host"]
    if type(input_count) is not int or not all(0 <= i < input_count for i in on_host):
        raise ValueError("the facts are no graph's")
    return Facts(input_count, frozenset(on_host))


def _path(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from pygraph._version import __version__

    name = hashlib.sha256(f"{__version__}|{key}".encode()).hexdigest()
    return Path(cache_dir()) / "pygraph" / f"programs-v{_FORMAT}" / f"{name}.json"


@functools.cache
def install() -> None:
    """Wraps the loading of entries. Without effect outside :func:`attaching`."""
    from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult

    load = GenericAOTAutogradResult.wrap_post_compile

    def wrap_post_compile(entry: Any, args: Any, aot_config: Any, fx_config: Any) -> Any:
        attach = _attach.get()
        if attach is not None:
            fx_config = _prepare(entry, attach, fx_config)
        return load(entry, args, aot_config, fx_config)

    GenericAOTAutogradResult.wrap_post_compile = functools.wraps(load)(wrap_post_compile)


def _prepare(entry: Any, attach: Attach, fx_config: dict[str, Any]) -> dict[str, Any]:
    """Makes the entry's graphs be attached right after they are loaded. Raises if facts are missing."""
    from torch._inductor.utils import BoxedBool

    parts = [part for part in (entry.compiled_fw, entry.compiled_bw) if part is not None]
    facts = [find(part.fx_graph_cache_info[0]) for part in parts]
    subclasses = entry.maybe_subclass_meta
    metadata = entry.runtime_metadata if subclasses is None else subclasses.fw_metadata

    def post_compile(part: Any, known: Facts, graph: Any, config: Any) -> Any:
        result = type(part).post_compile(part, graph, config)
        attach(graph, known, metadata)
        return result

    for part, known in zip(parts, facts, strict=True):
        part.post_compile = functools.partial(post_compile, part, known)
    return {**fx_config, "cudagraphs": BoxedBool(False)}
