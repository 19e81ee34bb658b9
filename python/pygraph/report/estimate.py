"""The report from traced graphs alone, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pygraph.observations import Cut, Observation
from pygraph.report.classify import Kind, Segment, cuts, segments
from pygraph.report.explanation import Report, Share, StripPart
from pygraph.report.fake_gpu import trace
from pygraph.report.stats import GraphStats


def estimate(
    program: str, model: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Report:
    """Traces one forward call on a fake GPU."""
    observation = trace(model, args, kwargs)
    rows: list[GraphStats] = []
    strip: list[StripPart] = []
    for name, graph in observation.graphs:
        parts = segments(graph)
        expected = [part for part in parts if part.kind is Kind.GRAPH]
        for number, part in enumerate(expected):
            rows.append(_expected(f"{name} part {number}" if len(expected) > 1 else name, part))
        strip += strip_parts(parts)
    in_graphs = sum(part.width for part in strip if part.kind == "graph")
    total = sum(part.width for part in strip)
    return Report(
        program=program,
        device="an imagined GPU (none is needed)",
        estimated=True,
        shares=(Share("operations", in_graphs, total),),
        graphs=tuple(rows),
        cuts=tuple(observed_cuts(observation)),
        transformations=tuple(observation.applied),
        strip=tuple(strip),
    )


def observed_cuts(observation: Observation) -> list[Cut]:
    """All cuts inside and between the graphs, each once."""
    found = [cut for _, graph in observation.graphs for cut in cuts(graph)]
    return list(dict.fromkeys([*observation.breaks, *found]))


def strip_parts(parts: Sequence[Segment]) -> list[StripPart]:
    """The strip of the report. Widths are numbers of GPU operations; work of the CPU alone has none."""
    kinds = {Kind.GRAPH: "graph", Kind.GAP: "gap"}
    return [
        StripPart(kinds[part.kind], ", ".join(part.names), part.gpu_operations)
        for part in parts
        if part.gpu_operations > 0
    ]


def _expected(name: str, part: Segment) -> GraphStats:
    return GraphStats(name, 0, "expected", "", part.gpu_operations, part.inputs, part.outputs)
