"""Recordings of which the program does not learn, although it asks.

A program may ask whether its stream captures (``torch.cuda.is_current_stream_capturing``), and take
another way then. Its graph would not compute what the uncaptured call does. So code outside of PyTorch
gets the answer of an uncaptured call: no. PyTorch's own code, Triton's and PyGraph's get the truth.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType

from torch.cuda import graphs

from pygraph import dynamo_program
from pygraph.undoing import Undo

_ASKS = "_cuda_isCurrentStreamCapturing"  # the global by which PyTorch's function asks the driver
_TOLD_THE_TRUTH = frozenset(("torch", "triton", "pygraph"))  # packages


@dataclasses.dataclass
class HiddenCapture:
    """Of the recordings of one attempt. was_asked: whether the program has asked in one of them."""

    was_asked: bool = False

    def begin(self, undo: Undo) -> None:
        """Hides the captures of this thread, until the step is made that it adds to ``undo``. Does
        nothing in a release of PyTorch that asks in another way."""
        original = getattr(graphs, _ASKS, None)
        if original is None or isinstance(original, type):  # PyTorch without CUDA has a class there
            return
        thread = threading.get_ident()

        def answer() -> bool:
            """Somebody may have kept it, and ask it later."""
            is_hidden = getattr(graphs, _ASKS, None) is answer and threading.get_ident() == thread
            if not original():
                return False
            if not is_hidden or not _is_of_program(sys._getframe(1)):
                return True
            self.was_asked = True
            return False

        # Compiled code asks where its graph breaks. Dynamo would compile these, which is an error in a
        # capture, and compiled code has other frames.
        for function in (answer, _is_of_program):
            dynamo_program.leave_alone(function)
        undo.append(functools.partial(_put_back, answer, original))
        setattr(graphs, _ASKS, answer)


def _put_back(answer: Callable[[], bool], original: Callable[[], bool]) -> None:
    """A step. Another value, which somebody else has put there, stays."""
    if getattr(graphs, _ASKS, None) is answer:
        setattr(graphs, _ASKS, original)


def _is_of_program(frame: FrameType | None) -> bool:
    """Whether the program asks. frame: of the caller, which may be PyTorch's function for it."""
    while frame is not None and frame.f_globals is vars(graphs):
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.split(".")[0] not in _TOLD_THE_TRUTH
