"""Barriers in Inductor's kernels between threads that read memory and threads that overwrite it.

Triton may load an element more than once, by different threads, and nothing then orders one thread's
load and another's store. Inductor puts a barrier there in one case only
(docs/explanation/inductor-race.md).

A kernel's code comes in sections: a loop with what is stored after it, or straight code. In a section
all loads stand before all stores. So two rules are enough, whatever layouts Triton chooses:

* In a kernel that reads a buffer and writes it too, a barrier stands before each section's stores.
* After a section that stores, a barrier stands before the next one.

The generation of code is replaced by a patch of PyTorch that cannot be switched off
(``kernel_barriers`` in :mod:`pygraph.torch_patches.table`). Where the installed Inductor generates code
in a way that is not known, kernels are left as they are, and PyGraph uses no graphs (:func:`why_not`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from pygraph import torch_patches

_BARRIER = "tl.debug_barrier()"
# Kernels in which several blocks of threads share a row would need barriers between blocks.
_NOT_FOR_BARRIERS = {
    "triton.cooperative_reductions": False,
    "triton.force_cooperative_reductions": False,
}

_wanted: ContextVar[bool] = ContextVar("pygraph_barriers", default=False)


def why_not() -> str:
    """Why kernels do not get the barriers; empty if they do. Thread-safe."""
    reason = torch_patches.provide("kernel_barriers")
    return f"Inductor's kernels may overwrite what they still read: {reason}" if reason else ""


@contextlib.contextmanager
def in_generated_kernels() -> Iterator[None]:
    """A context in which kernels that this thread's Inductor generates get the barriers, unless
    ``why_not`` has a reason."""
    if why_not():
        yield
        return
    token = _wanted.set(True)
    try:
        with torch._inductor.config.patch(_NOT_FOR_BARRIERS):
            yield
    finally:
        _wanted.reset(token)


def wanted() -> bool:
    """Whether kernels that this thread generates now get the barriers."""
    return _wanted.get()


@functools.cache
def install() -> None:
    """Wraps the generation of a section of code. Kernels of other backends are not changed."""
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.select_algorithm import TritonTemplateKernel

    generate = TritonKernel.codegen_body

    def codegen_body(kernel: Any) -> None:
        # What is fused into a template, such as a matrix product's, overwrites nothing (the scheduler
        # fuses nothing else), and warps of a template may go different ways.
        if wanted() and not isinstance(kernel, TritonTemplateKernel):
            _generate_section(kernel, generate)
        else:
            generate(kernel)

    TritonKernel.codegen_body = functools.wraps(generate)(codegen_body)


def _generate_section(kernel: Any, generate: Callable[[Any], None]) -> None:
    is_empty = not (
        kernel.indexing_code
        or kernel.loads
        or kernel.compute
        or kernel.stores
        or kernel.post_loop_combine
        or kernel.post_loop_store
    )
    if is_empty:
        return
    stores = bool(kernel.stores or kernel.post_loop_store)
    if _reads_what_it_writes(kernel):
        if kernel.stores:
            kernel.compute.writeline(_BARRIER)  # the last of what stands before the stores
        if kernel.post_loop_store:
            kernel.post_loop_store = _after_barrier(kernel.post_loop_store)
    kernel.pygraph_sections = getattr(kernel, "pygraph_sections", 0) + 1
    generate(kernel)
    if stores:
        kernel.body.writeline(_barrier_unless_last(kernel, kernel.pygraph_sections))


def _reads_what_it_writes(kernel: Any) -> bool:
    """Whether the kernel overwrites a buffer in place, or writes an input of the program that it also
    reads."""
    from torch._inductor.codegen.common import InplacedBuffer

    args = kernel.args
    if any(isinstance(buffer, InplacedBuffer) for buffer in args.inplace_buffers.values()):
        return True
    return not args.input_buffers.keys().isdisjoint(args.output_buffers.keys())


def _after_barrier(stores: Any) -> Any:
    from torch._inductor.utils import IndentedBuffer

    lines = IndentedBuffer()
    lines.writeline(_BARRIER)
    lines.splice(stores)
    return lines


def _barrier_unless_last(kernel: Any, section: int) -> Any:
    """A line with a barrier, which is left out if no section follows."""
    from torch._inductor.utils import DeferredLineBase

    class Barrier(DeferredLineBase):  # type: ignore[misc]
        def __call__(self) -> str | None:
            return self.line if kernel.pygraph_sections > section else None

        def _new_line(self, line: str) -> Barrier:
            return Barrier(line)

    return Barrier(_BARRIER)
