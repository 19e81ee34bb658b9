"""Lets the backend make partitions of programs that Inductor compiles for the CPU.

The compiler's side is the real one: Inductor, its caches and AOTAutograd's. In place of the engine are
functions that run each partition uncaptured, and tell of it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.scheduler import Scheduler

from pygraph import runtime
from pygraph.compile import attachment
from pygraph.partition.partition import Partition
from pygraph.partition.signature import PartitionInfo


class CpuGraphs:
    """What was made of the programs since ``clear``."""

    def __init__(self) -> None:
        self.infos: list[PartitionInfo] = []
        self.routes: list[Any] = []  # around Python wrappers
        self.calls: list[str] = []  # the kinds of partitions that were called
        self.options: list[Any] = []
        self.error: Exception | None = None  # that making a partition raises, once

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def partition(self, function: Any, info: PartitionInfo, options: Any, compilation: Any) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.infos.append(info)
        self.options.append(options)
        return Partition(self._noted(function, info), info, options, compilation)

    def _noted(self, function: Callable[[list[Any]], Any], info: PartitionInfo) -> Any:
        def called(args: list[Any]) -> Any:
            self.calls.append(info.kind)
            return function(args)

        return called

    def whole_graph(self, partition: Any, otherwise: Any, *route: Any) -> Any:
        self.routes.append(route)
        return otherwise


def install(monkeypatch: pytest.MonkeyPatch) -> CpuGraphs:
    graphs = CpuGraphs()
    real = runtime.engine()

    class Engine:
        """Runs each partition uncaptured."""

        graphed_callable = staticmethod(lambda uncaptured, miss, device: uncaptured)
        whole_graph_callable = staticmethod(graphs.whole_graph)
        clear_decisions = staticmethod(lambda callable: None)

        def __getattr__(self, name: str) -> Any:
            if name in ("compiled_call", "module_call"):
                raise AttributeError(name)  # these know the engine's own callables
            return getattr(real, name)

    engine = Engine()
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    # Of callables that the real engine does not know: it must not be asked to reset them later.
    monkeypatch.setattr(runtime, "partitions", weakref.WeakSet())
    monkeypatch.setattr(runtime, "unavailable_reason", lambda: None)
    monkeypatch.setattr(Scheduler, "should_partition", lambda self, node: None)
    make = CompiledFxGraph.__init__

    def make_with_device(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.device_idxs.add(0)

    monkeypatch.setattr(CompiledFxGraph, "__init__", make_with_device)
    monkeypatch.setattr(attachment, "Partition", graphs.partition)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return graphs


def tell(steps: int = 1) -> None:
    """A program of its own process: trains a step, runs inference, and prints what was made."""
    from torch._dynamo.utils import counters

    graphs = install(pytest.MonkeyPatch())
    weight = torch.eye(3, requires_grad=True)

    @torch.compile(
        backend="pygraph", options={"pygraph.patches": "warm_start", "pygraph.warm_start": True}
    )
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, weight), weight)

    for _ in range(steps):
        program(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        program(torch.ones(2, 3))
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((3, 3), 4.0))
    found = counters["aot_autograd"]
    print(found["autograd_cache_miss"], found["autograd_cache_hit"], file=sys.stdout)
    print(graphs.infos, graphs.routes, graphs.calls)


if __name__ == "__main__":
    tell()
