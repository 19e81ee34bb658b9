"""The pass that Inductor calls on each post-grad graph: runs the transformations that are switched
on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from pygraph.fx_passes.cache_key import CacheKeyPass
from pygraph.fx_passes.fx_nodes import drop_unused, gpu_of
from pygraph.fx_passes.move_cpu_operands import Placement
from pygraph.fx_passes.sink_cpu_outputs import keep_cpu_values, sink_cpu_outputs
from pygraph.observations import Applied
from pygraph.runtime import log

_VERSION = 4  # in the key of Inductor's cache


class GraphPass(CacheKeyPass):
    """Transforms a graph in place. One object per compilation.

    enabled: names out of :data:`pygraph.options.TRANSFORMS`.
    user_pass: a pass of the user's, which runs first.
    watch: called with each transformed outermost graph, and the notes of all transformations of it and
        of the graphs inside it.
    outermost: the module whose graph is inside no other graph (the branch of a conditional is inside
        one). It is transformed last, and only its constants get a value from Inductor. None: every
        graph counts as outermost.
    """

    def __init__(
        self,
        enabled: frozenset[str],
        user_pass: Any = None,
        watch: Callable[[fx.Graph, list[Applied]], None] | None = None,
        outermost: fx.GraphModule | None = None,
    ) -> None:
        super().__init__(user_pass, _VERSION, sorted(enabled))
        self.enabled = enabled
        self._watch = watch
        self._outermost = outermost
        self._applied: list[Applied] = []  # to the graphs inside of the next outermost one

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        applied = self.transform(graph)
        for note in applied:
            log.info("%s: %s (%s)", note.transform, note.what, note.where or "unknown line")
        self._applied += applied
        if self._is_outermost(graph):
            applied, self._applied = self._applied, []
            if self._watch is not None:
                self._watch(graph, applied)

    def transform(self, graph: fx.Graph) -> list[Applied]:
        """Runs the transformations; returns those that found something to do."""
        gpu = gpu_of(graph)
        if gpu is None:
            return []
        from pygraph.fx_passes import fake_operators  # noqa: F401  only where a program is compiled

        applied: list[Applied] = []
        placement = Placement(graph, gpu, self.enabled, self._is_outermost(graph))
        placement.run()
        applied += placement.applied
        drop_unused(graph)
        if "cpu_outputs" in self.enabled:
            applied += sink_cpu_outputs(graph)
        keep_cpu_values(graph)
        lint: Any = graph.lint  # which has no type before PyTorch 2.15
        lint()
        return list(dict.fromkeys(applied))

    def _is_outermost(self, graph: fx.Graph) -> bool:
        return self._outermost is None or graph.owning_module is self._outermost
