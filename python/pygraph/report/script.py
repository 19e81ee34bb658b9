"""The report of a whole script, after it has run."""

from __future__ import annotations

import torch

from pygraph import runtime
from pygraph.observations import Cut, Observation
from pygraph.report.estimate import observed_cuts
from pygraph.report.explanation import Report
from pygraph.report.loop_calls import Calls
from pygraph.report.measure import counted_shares, counted_strip, graph_rows, refusals
from pygraph.report.plain_loops import plain_loops


def report_on(program: str, observation: Observation, calls: Calls) -> Report:
    """The report of everything that was compiled or graphed, counted from the graphs, not profiled.

    calls: those of the program's training loops.
    """
    reason = runtime.unavailable_reason()
    cuts = [*observed_cuts(observation), *refusals(observation)]
    if reason is not None:
        remedy = "pygraph.explain(model, *inputs) estimates without a GPU"
        cuts.append(Cut("refusal", f"nothing was captured: {reason}", "", remedy))
    return Report(
        program=program,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        estimated=True,
        shares=counted_shares(observation),
        graphs=tuple(graph_rows(observation)),
        cuts=tuple(dict.fromkeys(cuts)),
        transformations=tuple(observation.applied),
        strip=tuple(counted_strip(observation)),
        loops=tuple(plain_loops(calls)),
    )
