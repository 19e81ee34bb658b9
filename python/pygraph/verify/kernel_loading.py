"""Loads the kernels that verification uses, while a program is loaded from the compiler's caches.

The driver loads a kernel when it is launched for the first time, which takes up to 40 ms. A thread
launches them meanwhile, on a few elements and a stream of its own: first those that the program's first
call waits for. When that call ends, the thread has ended.

Other threads use the GPU in that time anyway, to compile and to call. The thread does nothing but speed
the first calls up, so its errors are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from pygraph.gpu.fingerprint import of_few, values_of
from pygraph.runtime import log
from pygraph.verify.compare import Comparison, same_bits

_ELEMENTS = 64

_lock = threading.Lock()
_loader: _Loader | None = None


def begin(inputs: Iterable[object]) -> None:
    """For a program with these inputs, if it is the first one of the process with inputs on a GPU."""
    global _loader
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda]
    with _lock:
        if _loader is not None or not tensors:
            return
        _loader = _Loader(tensors)
        try:
            _loader.start()
        except RuntimeError as error:  # no more threads
            _loader.fingerprints.set()
            log.debug("kernels are loaded at their first use: %s", error)


def wait_for_fingerprints() -> None:
    """If that has begun."""
    if _loader is not None:
        _loader.fingerprints.wait()


def wait() -> None:
    """Until nothing is being loaded."""
    if _loader is not None and _loader.ident is not None:
        _loader.join()


class _Loader(threading.Thread):
    """fingerprints: set when their kernels are loaded, or have failed to be."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(name="pygraph loads kernels")
        self.fingerprints = threading.Event()
        self._device = inputs[0].device
        self._dtypes = list(dict.fromkeys(x.dtype for x in inputs))
        self._is_trained = any(x.requires_grad for x in inputs)

    def run(self) -> None:
        try:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                for dtype in self._dtypes:
                    fingerprint(dtype, self._device)
                self.fingerprints.set()
                for dtype in (
                    self._dtypes if self._is_trained else ()
                ):  # gradients differ from run to run
                    compare(dtype, self._device)
        except Exception as error:
            log.debug("kernels are loaded at their first use: %s", error)
        finally:
            self.fingerprints.set()


def fingerprint(dtype: torch.dtype, device: torch.device) -> None:
    """Makes what is made of inputs in a first call."""
    few = torch.zeros(_ELEMENTS, dtype=dtype, device=device)
    before, after = of_few(few), of_few(few)
    values_of([before, after])
    torch.stack([before != after]).tolist()


def compare(dtype: torch.dtype, device: torch.device) -> None:
    """Makes what is made of results that differ."""
    ones = torch.ones(_ELEMENTS, dtype=dtype, device=device)
    same_bits(ones, ones + ones)
    if not dtype.is_floating_point:
        return
    comparison = Comparison([ones])
    comparison.find_unwritten([torch.zeros_like(ones)])
    for factor in (1.0, 1.01, 1.02):
        comparison.add_run([ones * factor])
    comparison.add_replay([ones])
    comparison.mismatches()
