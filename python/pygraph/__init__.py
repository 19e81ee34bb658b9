"""PyGraph: CUDA Graphs for PyTorch programs without a change to the program.

``torch.compile(model, backend="pygraph")`` is all a program needs; it does not even have to import
this package. What is here looks inside: :func:`explain` says how much of a program runs in graphs and
why the rest does not, :func:`stats` what became of each graph, :func:`status` what is replaced of
PyTorch; :func:`reset` gives the graphs' memory back.
"""

from pygraph._version import __version__
from pygraph.report import Report, explain
from pygraph.report.stats import GraphStats, stats
from pygraph.runtime import reset
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
]
