"""What can be seen of a call, and what two series of calls differ in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass
class Seen:
    """One call: copies of results and of arguments after it, layouts, who shares storage with whom,
    states of generators, the exception."""

    number: int
    error: str = ""  # the exception's type
    error_text: str = ""
    error_trace: list[str] = dataclasses.field(default_factory=list)  # its innermost frames
    names: list[str] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    layouts: list[Any] = dataclasses.field(default_factory=list)
    shared: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    states: list[bytes] = dataclasses.field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            self.layouts.append((name, None if value is None else repr(value)))
            return
        t = value.detach()
        self.layouts.append((name, tuple(t.shape), t.stride(), t.dtype, str(t.device), t.is_conj()))
        self.names.append(name)
        self.tensors.append(t.clone() if not t.is_conj() else t.resolve_conj().clone())


def shared_storages(outputs: Sequence[Any], arguments: dict[str, Any]) -> set[tuple[str, str]]:
    """Pairs of an argument and a result, or of two results, that lie in one storage."""
    named = [(f"result {i}", t) for i, t in enumerate(outputs)] + list(arguments.items())
    storages = [
        (name, t.untyped_storage().data_ptr(), t.storage_offset())
        for name, t in named
        if isinstance(t, torch.Tensor) and t.numel() > 0
    ]
    return {
        (a, b)
        for i, (a, first, _) in enumerate(storages)
        for b, second, _ in storages[i + 1 :]
        if first == second and a.startswith("result")
    }


def states(device: str, generator: torch.Generator | None) -> list[bytes]:
    """Of the default generators and of the program's own one."""
    found = [torch.get_rng_state()]
    if device.startswith("cuda"):
        found.append(torch.cuda.get_rng_state())
    if generator is not None:
        found.append(generator.get_state())
    return [state.numpy().tobytes() for state in found]


@dataclasses.dataclass(frozen=True)
class Difference:
    """call, what: where. gap: the norm of what tensors differ by. distance: the same, relative to the
    tensor's norm. NaN where there is none. error: what was raised, by one of both only."""

    call: int
    what: str
    text: str
    gap: float = float("nan")
    distance: float = float("nan")
    error: str = ""


# While one thread compiles, PyTorch 2.11 refuses calls in others, with any backend.
_TRACED_ELSEWHERE = "using FX to symbolically trace"
# Of Inductor itself, by whose passes or without whose cache it may not come to that under PyGraph.
_OF_THE_COMPILER = "InductorError"


def message_of(seen: Seen) -> str:
    """The exception's type and the beginning of its text."""
    return f"{seen.error}: {seen.error_text[:60]}"


def differences(
    expected: list[Seen], actual: list[Seen], ignores_shared_results: bool
) -> list[Difference]:
    """Waits for the device once, where all is equal.

    ignores_shared_results: whether results may share storages that they did not share before.
    """
    found: list[Difference] = []
    pairs = list(zip(expected, actual, strict=False))  # a series ends where its first call raises
    for a, b in pairs:
        if a.error or b.error:
            is_excused = _TRACED_ELSEWHERE in b.error_text + a.error_text
            is_excused |= a.error == _OF_THE_COMPILER and not b.error
            if a.error != b.error and not is_excused:
                text = f"raised {b.error or 'nothing'}, not {a.error or 'anything'}"
                text += f": {b.error_text or a.error_text}"
                raised = message_of(b) if b.error else message_of(a)
                found.append(Difference(a.number, "error", text, error=raised))
            continue
        if a.layouts != b.layouts:
            changed = [
                f"{y} instead of {x}" for x, y in zip(a.layouts, b.layouts, strict=False) if x != y
            ]
            found.append(Difference(a.number, "layout", "; ".join(changed[:3])))
        if a.states != b.states:
            found.append(Difference(a.number, "random", "the generators' states differ"))
        extra = {
            pair
            for pair in b.shared - a.shared
            if not (ignores_shared_results and pair[1][:6] == "result")
        }
        if a.shared - b.shared or extra:
            found.append(
                Difference(a.number, "shared", f"shared: {sorted(b.shared)}, not {sorted(a.shared)}")
            )
    return found + _differing_tensors(pairs)


def gaps(expected: list[Seen], actual: list[Seen]) -> dict[tuple[int, str], float]:
    """By call and value, the norm of what two series differ by; the larger one of concurrent calls."""
    found: dict[tuple[int, str], float] = {}
    for call, name, x, y in _comparable(list(zip(expected, actual, strict=False))):
        gap, _ = _gap(x, y)
        if math.isfinite(gap):
            found[call, name] = max(gap, found.get((call, name), 0.0))
    return found


def _comparable(
    pairs: list[tuple[Seen, Seen]],
) -> list[tuple[int, str, torch.Tensor, torch.Tensor]]:
    return [
        (a.number, name, x, y)
        for a, b in pairs
        for name, x, y in zip(a.names, a.tensors, b.tensors, strict=False)
        if x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and x.numel()
    ]


def _differing_tensors(pairs: list[tuple[Seen, Seen]]) -> list[Difference]:
    compared = _comparable(pairs)
    if not compared:
        return []
    flags = [(bits(x) != bits(y)).any().to(compared[0][2].device) for _, _, x, y in compared]
    is_different = torch.stack(flags).tolist()
    return [
        Difference(call, name, *_describe(x, y))
        for (call, name, x, y), differs in zip(compared, is_different, strict=True)
        if differs
    ]


def bits(t: torch.Tensor) -> torch.Tensor:
    if t.is_complex():
        t = torch.view_as_real(t)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])


def _describe(x: torch.Tensor, y: torch.Tensor) -> tuple[str, float, float]:
    changed = int((bits(x) != bits(y)).sum())
    gap, norm = _gap(x, y)
    distance = gap / norm if norm != 0 else (0.0 if gap == 0 else float("inf"))
    first = x.flatten()[:4].tolist(), y.flatten()[:4].tolist()
    text = f"{changed} of {x.numel()} elements differ, expected {first[0]} got {first[1]}"
    return text, gap, distance


def _gap(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The norms of the difference and of the finite elements of x. NaN where tensors have none."""
    if not (x.is_floating_point() or x.is_complex()):
        return float("nan"), float("nan")
    wide = torch.complex128 if x.is_complex() else torch.float64
    a, b = x.to(wide), y.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())  # infinities have no difference
    norm = float(a[a.isfinite()].norm()) if bool(a.isfinite().any()) else 0.0
    return float(torch.where(same, 0, a - b).norm()), norm
