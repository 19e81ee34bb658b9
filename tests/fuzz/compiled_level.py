"""Programs under torch.compile: PyGraph's backend beside plain Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .program import Program, function_source, namespace


def make(program: Program, device: str, backend: str) -> Callable[[list[Any]], list[Any]]:
    """The compiled program as a function of one argument list, which it consumes.

    Where it is trained, gradients of its floating-point arguments are among its results.
    """
    values = namespace(device)
    exec(compile(function_source(program), f"<program {program.seed}>", "exec"), values)
    settings = program.settings
    options: dict[str, Any] = {}
    if backend == "pygraph" and settings["lanes"] == 1:
        options["options"] = {"pygraph.lanes": 1}
    function = values["program"]
    if backend != "eager":
        function = torch.compile(function, backend=backend, dynamic=settings["dynamic"], **options)

    def run(args: list[Any]) -> list[Any]:
        taken = list(args)
        args.clear()
        if settings["grad"] == "no_grad":
            with torch.no_grad():
                return list(function(*taken))
        if settings["grad"] == "inference_mode":
            with torch.inference_mode():
                return list(function(*taken))
        return _trained(function, taken, settings["training"])

    return run


def _trained(function: Callable[..., list[Any]], args: list[Any], way: str) -> list[Any]:
    leaves: list[torch.Tensor] = []

    def prepared() -> list[Any]:
        """Leaves of a graph of autograd; the program may write to what is made of them."""
        leaves.clear()
        found = []
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.is_floating_point():
                leaf = arg.detach().clone().requires_grad_()
                leaves.append(leaf)
                arg = leaf * 1
            found.append(arg)
        return found

    def loss_of(outputs: list[Any]) -> torch.Tensor | None:
        used = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        if not used:
            return None
        return torch.stack([o.float().clamp(-9, 9).square().mean() for o in used if o.numel()]).sum()

    if way == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        outputs = list(checkpoint(function, *prepared(), use_reentrant=False))
    else:
        outputs = list(function(*prepared()))
    loss = loss_of(outputs)
    results = [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]
    if loss is None or not loss.requires_grad:
        return results
    if way == "retain_graph":
        loss.backward(retain_graph=True)
        loss.backward()
    elif way == "grad":
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return results + list(found)
    elif way == "two losses":
        first = list(leaves)
        other = loss_of(list(function(*prepared())))
        (loss if other is None else loss + other).backward()
        return results + [leaf.grad for leaf in (*first, *leaves)]
    elif way == "nested":
        first = list(leaves)
        inner = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        again = prepared()
        for i, arg in enumerate(again):
            match = [o for o in inner if isinstance(arg, torch.Tensor) and _same_form(o, arg)]
            if match:
                again[i] = match[0]
        other = loss_of(list(function(*again)))
        (loss if other is None else other).backward()
        return results + [leaf.grad for leaf in (*first, *leaves)]
    elif way == "accumulate":
        kept = list(leaves)
        loss.backward(retain_graph=False)
        again = loss_of(list(function(*[_again(arg, kept) for arg in prepared()])))
        if again is not None and again.requires_grad:
            again.backward()
        return results + [leaf.grad for leaf in kept]
    else:
        loss.backward()
    return results + [leaf.grad for leaf in leaves]


def _same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def _again(arg: Any, kept: list[torch.Tensor]) -> Any:
    """The first forward's leaf of the same form, so that its gradient is added to."""
    if not isinstance(arg, torch.Tensor):
        return arg
    match = [leaf for leaf in kept if _same_form(leaf, arg)]
    return match[0] * 1 if match else arg
