"""What Inductor's Triton kernels read and write, parameter by parameter.

Inductor names the parameters of its kernels by their use: ``in_ptr0`` is read, ``out_ptr0`` written,
``in_out_ptr0`` both. The user's own kernels, and kernels whose blocks wait for each other
(``sem_ptr``), have no known accesses. The engine takes one letter per parameter of the compiled kernel
(bindings/record/declared_access.h).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(r"(i|u|fp|bf|f)\d+")  # a type; descriptors of tensors hold addresses
_READ = re.compile(r"in_ptr\d+")
_MAY_BE_WRITTEN = re.compile(r"(out_ptr|in_out_ptr|ws_ptr)\d*")


def accesses_of(function: Callable[..., Any]) -> dict[int, str]:
    """The accesses of all kernels of the function's compiled program, by kernel address."""
    from torch._inductor.runtime.hints import HeuristicType
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found: dict[int, str] = {}
    for value in list(getattr(function, "__globals__", {}).values()):
        if not isinstance(value, CachingAutotuner):
            continue
        if value.heuristic_type is HeuristicType.USER_AUTOTUNE:
            continue
        for launcher in value.launchers:
            try:
                address, names = _compiled(launcher, value.triton_meta["signature"])
            except (AttributeError, KeyError):  # another kind of launcher
                continue
            letters = letters_of(names, value.triton_meta["signature"], value.inductor_meta)
            if letters is not None and address is not None:
                found[address] = letters
    return found


def letters_of(names: list[str], types: dict[str, str], meta: dict[str, Any]) -> str | None:
    """One letter per parameter; None if the kernel has a parameter of unknown kind.

    types: Triton's types, by parameter name.
    meta: Inductor's metadata, which names parameters that share memory with written ones.
    """
    mutated = set(meta.get("mutated_arg_names") or ())
    letters = ""
    for name in names:
        kind = types.get(name, "")
        if _NUMBER.fullmatch(kind):
            letters += "-"
        elif not kind.startswith("*"):
            return None
        elif _READ.fullmatch(name) and name not in mutated:
            letters += "r"
        elif _READ.fullmatch(name) or _MAY_BE_WRITTEN.fullmatch(name):
            letters += "w"
        else:
            return None
    return letters


def _compiled(launcher: Any, types: dict[str, str]) -> tuple[int | None, list[str]]:
    """The address of the kernel that a launcher launches, and the names of its parameters.

    A kernel that is compiled for any GPU, as PyTorch has from 2.14 on, has no address of its own.
    """
    scope = launcher.__globals__
    if getattr(launcher, "_is_static", False):
        kernel = scope["runner"].__self__
        names = [n for i, n in enumerate(kernel.arg_names) if i not in kernel.full_constexprs]
        return kernel.function, names
    return scope["function"], [name for name, kind in types.items() if kind != "constexpr"]
