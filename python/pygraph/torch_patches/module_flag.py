"""The context manager of the flag that a compiled module is being called: a class, not a generator."""

from __future__ import annotations

from typing import Any

from torch._dynamo import eval_frame


class InOptimizedModule:
    """As torch._dynamo.eval_frame._set_in_optimized_module."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = eval_frame._in_optimized_module
        eval_frame._in_optimized_module = True

    def __exit__(self, *_: object) -> None:
        eval_frame._in_optimized_module = self._before


def apply() -> None:
    for ours in (InOptimizedModule.__enter__, InOptimizedModule.__exit__):
        eval_frame.skip_code(ours.__code__)  # frames of PyTorch's own are not traced either
    flag: Any = InOptimizedModule
    eval_frame._set_in_optimized_module = flag
