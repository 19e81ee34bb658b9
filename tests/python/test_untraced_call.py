"""A graph that is one partition is called by the code that Dynamo writes, without Python in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import decorators
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph import runtime
from pygraph.compile.wrapper_bypass import Route, Shortcut
from tests.python.compiled_programs import ReducingBackend


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _name_of_graph(function: Any) -> str:
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    (name,) = (n for n in entry.code.co_names if n.startswith("__compiled_fn"))
    return name  # type: ignore[no-any-return]


class _WholeGraph(ReducingBackend):
    """Returns what PyGraph's backend returns for a graph that is one partition."""

    def __init__(self) -> None:
        super().__init__(reduces=True)
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = super().__call__(gm, inputs)
        partition = runtime.engine().graphed_callable(list, list, 0)

        def uncaptured(*args: torch.Tensor) -> Any:  # would be traced, and its own calls compiled
            self.calls += 1
            assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
            return run(*args)

        route = Route(list(range(len(inputs))), [(True, 0, None)])
        return Shortcut(partition, len(inputs), route).around(uncaptured)


def test_a_whole_graph_is_called_without_python_in_between() -> None:
    torch._dynamo.reset()
    before = decorators.DisableContext
    backend = _WholeGraph()
    compiled = torch.compile(_plus_one, backend=backend)
    with runtime.uncaptured():  # which can be looked at without a GPU
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(2)), torch.ones(2) + 1)
    assert (backend.graphs, backend.calls) == (1, 3)
    assert type(_plus_one.__globals__[_name_of_graph(_plus_one)]) is runtime.engine().WholeGraphCallable
    assert decorators.DisableContext is before


def test_other_functions_are_not_traced_either() -> None:
    torch._dynamo.reset()
    torch.compile(_plus_one, backend=ReducingBackend(reduces=True))(torch.ones(2))
    assert _plus_one.__globals__[_name_of_graph(_plus_one)]._torchdynamo_disable
