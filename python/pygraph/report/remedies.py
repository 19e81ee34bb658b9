"""The remedy for each reason that a graphed callable has no graph.

docs/reference/reasons.md has the same texts with causes. Reasons that name their own remedy are not
listed here.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"\((?P<where>[^()\s]+\.\w+:\d+)\)$")

# The first that is found in the reason.
_REMEDIES = (
    ("it waits for the GPU", "return the tensor, and read it after the call"),
    ("a number is read back", "return the tensor, and read it after the call"),
    ("it draws random numbers on the CPU", "draw on the GPU, or pass the numbers as a tensor"),
    ("it has no tensors on a GPU", "move model and batch to the GPU before the first call"),
    ("what is passed to it differs", "pass tensors in place of values that change"),
    ("the memory or the gradients that it uses differs", "write into tensors in place"),
    (" differs from call to call", "pass it as a tensor on the GPU"),
    ("it uses more than one device", "make one callable per GPU"),
    ("a result requires a gradient", "call it under torch.no_grad(), or return it detached"),
    ("which may refer to tensors", "return a dictionary, a tuple or a list"),
    ("another structure than it did before", "make one callable for each way through it"),
    ("gradients to other tensors than before", "make one callable for each way through it"),
    ("an argument shares memory", "pass a copy"),
    ("is an iterator whose position cannot be read", "call next() outside, and pass what it gives"),
    ("it reaches more than", "refer to less from it"),
    ("works on tensors whose memory is not known", "do it outside of the callable"),
    ("uses memory that no tensor known", "keep the tensor in an attribute"),
    ("is off by default", "set the environment variable that it names"),
)


def where_in(reason: str) -> str:
    """The "file:line" at the end of a reason; empty if it has none."""
    found = _LINE.search(reason)
    return found["where"] if found else ""


def remedy_for(reason: str) -> str:
    """The remedy for a reason; empty if none is known, or if the reason itself names it."""
    if "; " in reason:
        return ""
    return next((remedy for text, remedy in _REMEDIES if text in reason), "")
