"""Operators of ``torch.library.custom_op``, which PyTorch 2.15 does not report by itself.

A recording listens to PyTorch's reports of operators (``at::RecordFunction``): an operator that is not
PyTorch's own may use memory that it holds itself, and refusals name it. PyTorch 2.15 calls the Python
kernels of such operators without the dispatcher that makes the reports ("PyObject Dispatcher" in
torch/_ops.py). While a recording is made they are called through it, as in earlier releases. The result
is the same. Meanwhile the calls of other threads go through it, too, and take longer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import torch

from pygraph.undoing import Undo

_lock = threading.Lock()
_recordings: set[object] = set()  # that want reports
_changed: list[torch._ops.OpOverload] = []


def report_all(undo: Undo) -> None:
    """PyTorch reports all operators until the steps of ``undo`` are made. Thread-safe; recordings may
    overlap."""
    recording = object()
    undo.append(functools.partial(_end, recording))
    with _lock:
        _recordings.add(recording)
        changed = list(_called_directly())
        _changed.extend(changed)
        for operator in changed:
            operator._enable_pyobj_dispatch(False)


def _end(recording: object) -> None:
    with _lock:
        _recordings.discard(recording)
        while _changed and not _recordings:
            _changed[-1]._enable_pyobj_dispatch(True)
            _changed.pop()


def _called_directly() -> Iterator[torch._ops.OpOverload]:
    """All operators that have been looked up so far and are called without the dispatcher."""
    if not hasattr(torch._ops.OpOverload, "_enable_pyobj_dispatch"):
        return
    for namespace in list(vars(torch.ops).values()):
        if not isinstance(namespace, torch._ops._OpNamespace):
            continue
        for packet in list(vars(namespace).values()):
            if not isinstance(packet, torch._ops.OpOverloadPacket):
                continue
            attributes = vars(packet)
            for name in list(packet):  # the names of its overloads: a few of its attributes
                overload = attributes.get(name)
                # (Reading the attribute takes half as long as calling the method that tests it.)
                if overload is not None and overload._pyobj_dispatcher is not None:
                    yield overload
