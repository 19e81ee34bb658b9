"""Operators of ``torch.library.custom_op``, which PyTorch 2.15 does not report by itself.

A recording listens to PyTorch's reports of operators (``at::RecordFunction``): an operator that is not
PyTorch's own may use memory that it holds itself, and refusals name it. PyTorch 2.15 calls the Python
kernels of such operators without the dispatcher that makes the reports ("PyObject Dispatcher" in
torch/_ops.py). While a recording is made they are called through it, as in earlier releases. The result
is the same; the calls of other threads take the longer way, too, meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_recordings = 0  # in how many contexts of reported() threads are
_changed: list[torch._ops.OpOverload] = []


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """In this context PyTorch reports all operators. Thread-safe; contexts may overlap."""
    global _recordings
    with _lock:
        _recordings += 1
        changed = list(_called_directly())
        _changed.extend(changed)
        for operator in changed:
            operator._enable_pyobj_dispatch(False)
    try:
        yield
    finally:
        with _lock:
            _recordings -= 1
            if _recordings == 0:
                while _changed:
                    _changed.pop()._enable_pyobj_dispatch(True)


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
            overloads = [o for o in list(vars(packet).values()) if isinstance(o, torch._ops.OpOverload)]
            yield from (o for o in overloads if o._is_pyobj_dispatcher_enabled())
