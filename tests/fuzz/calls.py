"""What a caller does: makes arguments, calls, keeps or changes results, and flips switches in between.

Two callers of the same program do the same in the same order, each with tensors of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .layouts import lay_out
from .program import GENERATOR, SIZE, Call, Input, Program, shape_of

VALUES = ["zero", "one", "small", "unchanged", "whole"]
ACTIONS_BEFORE = [
    *("reset", "collect", "empty_cache", "limit", "change_inputs", "change_kept", "replace_parameters"),
    *("drop_kept", "clear_plans"),
]
ACTIONS_AFTER = ["keep", "keep", "write_outputs", "drop"]
FLIPS = [
    *("tf32", "cudnn_tf32", "benchmark", "cudnn_deterministic", "precision", "deterministic", "flash"),
    *("efficient", "reduced_precision"),
]
_TABLE = 1 << 16
# Of a limit: what a direct call may take more than it has. A compiled program may tune a kernel in the
# call, with 60 MiB for flushing the L2 cache, beside segments of 2 MiB that PyGraph takes.
_HEADROOM = {"partition": 64 << 20, "compiled": 96 << 20}


@functools.cache
def _table(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(_TABLE, generator=generator).to(device)


def _numbers(kind: str, count: int, dtype: torch.dtype, device: str, at: int) -> torch.Tensor:
    if kind == "zero":
        return torch.zeros(count, dtype=dtype, device=device)
    if kind == "one":
        return torch.ones(count, dtype=dtype, device=device)
    table = _table(device)
    if count > _TABLE // 2:
        table = table.repeat(1 + 2 * count // _TABLE)
    start = at * 7919 % (table.numel() - count + 1)
    numbers = table[start : start + count]
    if kind == "small":
        numbers = numbers * 1e-3
    if kind == "whole" or not dtype.is_floating_point:
        numbers = (numbers * 3).round()
    return numbers.to(dtype).clone()


class Caller:
    """One caller's state: what it called with and got last, its parameters, what it keeps."""

    def __init__(self, program: Program, device: str, number: int = 0) -> None:
        self._program = program
        self._device = device
        self._number = number
        self._made = 0
        self.last: dict[str, torch.Tensor] = {}
        self.outputs: list[Any] = []
        self.kept: list[torch.Tensor] = []
        self.generator: torch.Generator | None = None
        if program.uses_generator:
            self.generator = torch.Generator(device).manual_seed(program.seed + number)

    def arguments(self, call: Call) -> dict[str, Any]:
        """By name. The same tensors as in earlier calls where the call says so."""
        size = self._program.sizes[call.size]
        values: dict[str, Any] = {}
        for spec in self._program.inputs:
            values[spec.name] = self._argument(spec, call, size, values)
        if self._program.uses_generator:
            values[GENERATOR] = self.generator
        if self._program.varies:
            values[SIZE] = size
        self.last = {i.name: values[i.name] for i in self._program.inputs}
        return values

    def _argument(self, spec: Input, call: Call, size: int, values: dict[str, Any]) -> torch.Tensor:
        shape, dtype = shape_of(spec, size), getattr(torch, spec.dtype)
        how, _, source = call.reuse.get(spec.name, "").partition(":")

        def fits(t: Any) -> bool:
            is_tensor = isinstance(t, torch.Tensor) and t.device.type == self._device.split(":")[0]
            return is_tensor and list(t.shape) == shape and t.dtype == dtype and not t.is_inference()

        found: Any = None
        if how == "same":
            found = self.last.get(spec.name)
        elif how == "output" and int(source) < len(self.outputs):
            found = self.outputs[int(source)]
            found = found if fits(found) and found.is_contiguous() and spec.layout == "plain" else None
        elif how == "alias":
            found = values.get(source)
            found = found if fits(found) and found.is_contiguous() and spec.layout == "plain" else None
        elif how == "overlap" and fits(values.get(source)) and spec.layout == "plain":
            count = values[source].numel()
            base = self._make([count + count // 2], dtype, "normal")
            values[source] = base[:count].view(shape)
            return base[count // 2 : count // 2 + count].view(shape)
        if fits(found):
            return found.detach() if found.requires_grad else found
        kind = call.values or spec.values
        if kind == "unchanged" and fits(self.last.get(spec.name)):
            old = self.last[spec.name].detach()
            copy = lay_out(spec.layout, shape, lambda s: self._make(s, dtype, "zero"))
            return copy if spec.layout == "expanded" else copy.copy_(old)
        return lay_out(spec.layout, shape, lambda s: self._make(s, dtype, kind))

    def _make(self, shape: list[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
        self._made += 1
        count = 1
        for n in shape:
            count *= n
        at = self._program.seed * 31 + self._made * 17 + self._number * 1009
        return _numbers(kind, count, dtype, self._device, at).view(shape)

    def before(self, action: str) -> None:
        """One of ACTIONS_BEFORE, but for those of the process."""
        if action == "change_inputs":
            for t in self.last.values():
                if t.is_floating_point() and 0 not in t.stride() and not t.is_inference():
                    t.detach().mul_(0.5)
        elif action == "change_kept":
            for t in self.kept:
                if t.is_floating_point() and 0 not in t.stride():
                    t.mul_(2)
        elif action == "replace_parameters":
            for spec in self._program.inputs:
                if spec.is_parameter:
                    self.last.pop(spec.name, None)
        elif action == "drop_kept":
            self.kept.clear()

    def after(self, call: Call, outputs: list[Any]) -> None:
        """What the caller does with its results, once they have been looked at."""
        tensors = [t.detach() for t in outputs if isinstance(t, torch.Tensor) and not t.is_inference()]
        self.outputs = tensors
        if "drop" in call.after:
            self.outputs = []
        if "keep" in call.after:
            self.kept += tensors
        if "write_outputs" in call.after:
            for t in tensors[:2]:
                if t.is_floating_point() and _is_plain(t):
                    t.add_(1)


def _is_plain(t: torch.Tensor) -> bool:
    return t.is_contiguous() and t.numel() > 0


def act_on_process(action: str, device: str) -> None:
    """What concerns all callers."""
    if action == "collect":
        gc.collect()
    elif action == "reset":
        import pygraph

        pygraph.reset()
    elif device.startswith("cuda") and action == "empty_cache":
        torch.cuda.empty_cache()
    elif device.startswith("cuda") and action == "clear_plans":
        torch.backends.cuda.cufft_plan_cache.clear()


@contextlib.contextmanager
def limited(call: Call, level: str, device: str) -> Iterator[None]:
    """Little memory for the call of a program of this level, if it says so."""
    if "limit" not in call.before or not device.startswith("cuda"):
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    most = torch.cuda.memory_reserved() + _HEADROOM[level]
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _switches() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any, Any]]:
    """By name: how to read it, how to set it, and its two values."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn

    def of(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None], Any, Any]:
        return (lambda: getattr(owner, name), lambda v: setattr(owner, name, v), True, False)

    def deterministic(value: bool) -> None:
        torch.use_deterministic_algorithms(value, warn_only=value)

    return {
        "tf32": of(cuda.matmul, "allow_tf32"),
        "cudnn_tf32": of(cudnn, "allow_tf32"),
        "benchmark": of(cudnn, "benchmark"),
        "cudnn_deterministic": of(cudnn, "deterministic"),
        "reduced_precision": of(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        "precision": (
            *(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            *("high", "highest"),
        ),
        "deterministic": (torch.are_deterministic_algorithms_enabled, deterministic, True, False),
        "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, True, False),
        "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, True, False),
    }


class Switches:
    """Flips settings of the process, and sets them back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def flip(self, name: str) -> None:
        read, write, first, second = _switches()[name]
        before = read()
        self._undo.append(lambda: write(before))
        write(second if before == first else first)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()
