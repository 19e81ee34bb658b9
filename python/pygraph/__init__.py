"""PyGraph: CUDA Graphs for PyTorch programs, without changes to the program.

``torch.compile(model, backend="pygraph")`` is all a program needs; it need not import this package. The
functions here inspect and reset: :func:`explain` reports how much of a program runs in graphs and why
the rest does not, :func:`stats` returns the state of each graph, :func:`status` lists which functions
of PyTorch are replaced, :func:`reset` drops all graphs and releases their memory, and in the context
:func:`uncaptured` no graph is used.
"""

from pygraph._version import __version__
from pygraph.report import Report, explain
from pygraph.report.stats import GraphStats, stats
from pygraph.runtime import reset, uncaptured
from pygraph.torch_patches import PatchStatus, Status, status

__all__ = [
    "GraphStats",
    "PatchStatus",
    "Report",
    "Status",
    "__version__",
    "explain",
    "reset",
    "stats",
    "status",
    "uncaptured",
]
