"""Parameters of the programs that the backend has compiled for training, for functions of PyTorch that
have graphs of their own in plain loops (docs/explanation/whole-steps.md, "Plain loops")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pygraph import runtime
from pygraph.callables.variant import device_of
from pygraph.options import Options

# With the options of the last program that has the parameter.
_trained = WeakIdKeyDictionary()
_programs = 0


def is_wanted(options: Options) -> bool:
    """Whether a program asks for graphs in its plain loop, and may have them."""
    is_asked_for = options.optimizers == "auto" and options.select != "never"
    return is_asked_for and runtime.unavailable_reason() is None


def note_program(inputs: Iterable[Any], options: Options) -> None:
    """Of a program that was compiled for training. Never raises."""
    global _programs
    with runtime.harmless("noting a program's parameters"):
        parameters = [x for x in inputs if isinstance(x, torch.nn.Parameter)]
        for parameter in parameters:
            _trained[parameter] = options
        if parameters:
            _programs += 1


def programs() -> int:
    """How many there have been. What was found out about parameters is true until there is another."""
    return _programs


def options_for(parameters: Sequence[torch.Tensor], patch: str) -> Options | None:
    """Of the program that has compiled one of the parameters. None for no such program, for one that
    does not ask for the patch, and for parameters that a graph cannot have."""
    device = device_of(list(parameters))
    if device is None or not all(is_plain(p) and p.device == device for p in parameters):
        return None
    found: Options | None = next((_trained[p] for p in parameters if p in _trained), None)
    return found if found is not None and patch in found.patches else None


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
