"""The origin of a generated kernel: the operators that Inductor fused into it, and the user's lines.

Inductor notes these while it compiles, if :data:`SETTINGS` are set, in two tables that it keeps with
the compiled graph, as JSON. Their keys are the names of kernels, each followed by a colon and a number.
A Triton kernel has the same name in a profiler's trace; kernels of libraries do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from pygraph.fx_passes.fx_nodes import line_in
from pygraph.observations import Origin

SETTINGS = {"trace.provenance_tracking_level": 1}


def origins_of(compiled: Any) -> dict[str, Origin]:
    """The origins by kernel name; empty if Inductor noted nothing."""
    mapping = json.loads(getattr(compiled, "inductor_provenance_mapping_str", None) or "{}")
    traces = json.loads(getattr(compiled, "inductor_provenance_stack_traces_str", None) or "{}")
    found: dict[str, Origin] = {}
    for key, nodes in mapping.get("cppCodeToPost", {}).items():
        name = key.rpartition(":")[0] or key
        lines = filter(None, map(line_in, traces.get(key, ())))
        origin = Origin(_unique(re.sub(r"_\d+$", "", node) for node in nodes), _unique(lines))
        found[name] = found[name].with_those_of(origin) if name in found else origin
    return found


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sorted(texts)))
