"""One uncaptured call of a callable, observed: what it used, and what it left behind."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph import runtime
from pygraph.callables.host_output import watch_output
from pygraph.callables.host_state import HostState, random_state
from pygraph.callables.inference_results import inference_among
from pygraph.callables.signature import Arguments, layouts_of
from pygraph.callables.user_code import is_library_file
from pygraph.undoing import Undo, undoing

_RESULTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_LARGEST_NUMBER = 16  # bytes
_LARGEST_HOST_TENSOR = 16  # elements of a tensor on the CPU whose values a graph may freeze


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What a call does to the gradient of one tensor.

    is_used: whether it reads or writes the one from before. after: "kept" (the same object), "none", or
    "made" (another object).
    """

    tensor: torch.Tensor
    is_used: bool
    after: str


@dataclasses.dataclass(frozen=True)
class Form:
    """Of a result. spec: its tree. kinds: of its leaves. detached: leaves whose backward is run in the
    call. is_differentiable: whether gradients flow from other results, or could flow to arguments.
    inference: leaves that are tensors of ``torch.inference_mode``."""

    spec: Any
    kinds: tuple[type, ...]
    detached: frozenset[int]
    is_differentiable: bool = False
    inference: frozenset[int] = frozenset()


@dataclasses.dataclass
class Observation:
    """result: the call's. form: of it. host: the host's state afterwards. effects: paths on the host
    that the call changed. state: the memory that it used and that was not passed. refusal: why the
    callable cannot have a graph; empty for no reason. is_whole: whether there was memory to find all of
    this."""

    result: Any
    form: Form
    host: HostState
    effects: list[str] = dataclasses.field(default_factory=list)
    state: Any = None
    gradients: list[Gradient] = dataclasses.field(default_factory=list)
    refusal: str = ""
    is_whole: bool = True


def watched_tensors(host: HostState) -> list[torch.Tensor]:
    """Those whose gradients a backward may set."""
    return [t for t in host.found.tensors.values() if t.requires_grad and t.is_leaf]


def observed_call(
    call: Callable[[], Any],
    is_changed: Callable[[], bool],
    arguments: Arguments,
    before: HostState,
    device: torch.device,
) -> Observation:
    """Makes the call. Raises what it raises. is_changed: tells afterwards whether the structure of the
    arguments is another one. before: the host's state before the call, of no use after it."""
    uncapturable: list[str] = []
    missed: list[BaseException] = []

    def note(name: str) -> None:
        from pygraph import operators  # which needs the engine when it is imported

        what = "ranks communicate in it" if operators.is_collective(name) else "it waits for the GPU"
        uncapturable.append(f"{what}: {name}{calling_line()}")

    def note_safely(name: str) -> None:
        """The engine drops what it raises."""
        try:
            note(name)
        except BaseException as error:
            missed.append(error)

    def body(undo: Undo) -> tuple[Any, set[str], Any]:
        run_backwards_here(undo)
        output = watch_output(undo)
        undo.append(torch.clear_autocast_cache)
        observer = runtime.engine().CallObserver(note_safely)
        undo.append(observer.end)  # at once: no interrupt comes in between
        return call(), output, observer

    drawn, layouts, hooks = random_state(), layouts_of(arguments), _saved_tensors_hooks()
    versions = _versions(arguments)
    leaves = watched_tensors(before)
    gradients = [tensor.grad for tensor in leaves]
    torch.clear_autocast_cache()  # what is in it was made in no call
    result, output, observer = undoing(body)
    if missed:
        raise missed[0]
    nodes = set(observer.backward_nodes)
    results, spec = pytree.tree_flatten(result)
    used = frozenset(i for i, leaf in enumerate(results) if _is_used_up(leaf, nodes))
    results = [leaf.detach() if i in used else leaf for i, leaf in enumerate(results)]
    if used:
        result = pytree.tree_unflatten(results, spec)
    needing = [*results, *(arguments.tensors if torch.is_grad_enabled() else ())]
    is_differentiable = any(isinstance(x, torch.Tensor) and x.requires_grad for x in needing)
    form = Form(spec, kinds_of(results), used, is_differentiable, inference_among(results))
    seen = Observation(result, form, before)
    seen.effects = sorted(output)
    if layouts_of(arguments) != layouts:
        seen.effects.append("a tensor that is passed to it, beyond its contents")
    if is_changed():
        seen.effects.append("a container that is passed to it")
    try:
        _look_back(seen, before, observer, arguments, gradients, device)
        if random_state() != drawn:
            seen.refusal, seen.effects = "it draws random numbers on the CPU", []
        elif _saved_tensors_hooks() != hooks:
            seen.refusal = "it leaves hooks for saved tensors open"
        elif uncapturable:
            seen.refusal = uncapturable[0]
        elif unfit_result(results):
            seen.refusal = unfit_result(results)
        elif _returns_its_own(result, seen.host):
            seen.refusal = "it returns a list or a dictionary that it keeps; return a copy"
        elif _versions(arguments) != versions:
            seen.refusal = "it writes to an argument that requires a gradient"
    except (MemoryError, torch.OutOfMemoryError):  # a later call may be looked at
        seen.is_whole = False
    except Exception as error:  # of what the walk has met; the call is made
        seen.refusal = runtime.first_line(error) or type(error).__name__
    return seen


def _look_back(
    seen: Observation,
    before: HostState,
    observer: Any,
    arguments: Arguments,
    gradients: list[torch.Tensor | None],
    device: torch.device,
) -> None:
    """Fills in what a call has used and changed. gradients: of the watched tensors, before."""
    after = seen.host = before.now()
    seen.effects = [*before.changes(after), *seen.effects]
    leaves = watched_tensors(before)
    seen.gradients = [
        Gradient(tensor, _is_used(old, arguments, observer), fate(old, tensor.grad))
        for tensor, old in zip(leaves, gradients, strict=True)
    ]
    old_gradients = [gradient for gradient in gradients if gradient is not None]
    new_gradients = [tensor.grad for tensor in leaves if tensor.grad is not None]
    reachable = list(after.found.tensors.values())
    excluded = [*arguments.tensors, *old_gradients, *new_gradients]
    state = seen.state = runtime.engine().State(observer, reachable, excluded, device)
    if _share_memory(arguments.tensors, reachable):
        seen.refusal = "an argument shares memory with what it reaches"
    elif observer.backward_nodes and any(_has_gradient(t) for t in arguments.tensors):
        seen.refusal = "an argument requires a gradient; pass it detached"
    elif observer.unknown:
        seen.refusal = f"operator {observer.unknown} works on tensors whose memory is not known"
    elif observer.used_other_devices(device):
        seen.refusal = "it uses more than one device"
    elif state.unowned:
        seen.refusal = f"operator {state.unowned} uses memory that no tensor known from before holds"
    elif seen.form.is_differentiable:  # what autograd has saved is still alive
        seen.refusal = _host_tensors(observer, device) or _not_differentiable(seen, before, observer)
    else:
        known = [*tensors_in(seen.result), *new_gradients]
        # A container that the call has filled and replaced is kept by nothing but this.
        before.forget()
        seen.refusal = _host_tensors(observer, device) or _survivors(observer, known, device)


def _saved_tensors_hooks() -> Any:
    """The innermost ones of the thread."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks and tuple(map(id, hooks))


def _returns_its_own(result: Any, host: HostState) -> bool:
    """Whether a container of the result is one that the callable reaches, which a replay's is not."""
    own = {id(d) for d, _, _ in host.found.dicts} | set(map(id, host.found.lists))
    pending = [result]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        if id(value) in own:
            return True
    return False


def _not_differentiable(seen: Observation, before: HostState, observer: Any) -> str:
    """Why a callable cannot have a graph inside of a differentiated program; empty if it may."""
    if any(gradient.is_used or gradient.after != "kept" for gradient in seen.gradients):
        return "it sets gradients, and returns a result that requires one; make two callables of it"
    if any(t.requires_grad and t.is_leaf for t in tensors_in(seen.result)):
        return "a result that requires a gradient is no function of anything that does"
    for path, tensor in before.found.tensors.items():
        if tensor.grad_fn is not None and observer.has_used(tensor):
            return f"it uses {path}, which has a history of its own in autograd; pass it as an argument"
    return ""


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Whether a backward in the call may have added to a gradient of an argument's."""
    return tensor.requires_grad and tensor.is_leaf and tensor.grad is not None


def _versions(arguments: Arguments) -> list[int]:
    """How often operators have written to arguments that require gradients."""
    if not torch.is_grad_enabled():
        return []
    return [t._version for t in arguments.tensors if t.requires_grad and not t.is_inference()]


def _is_used(gradient: torch.Tensor | None, arguments: Arguments, observer: Any) -> bool:
    """Whether a gradient from before is an input of its own."""
    if gradient is None or any(gradient is tensor for tensor in arguments.tensors):
        return False
    return bool(observer.has_used(gradient))


def _share_memory(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether one of the tensors lies in the memory of one of the others."""
    addresses = {t.untyped_storage().data_ptr() for t in others if t.layout == torch.strided} - {0}
    return any(
        t.untyped_storage().data_ptr() in addresses for t in tensors if t.layout == torch.strided
    )


def _is_used_up(leaf: Any, nodes: set[int]) -> bool:
    """Whether the backward of a result was run in the call. ``nodes``: the numbers of what ran.

    Such a result is of no more use to autograd, and would keep its nodes, with the stream that they
    were made on, until the next call.
    """
    has_history = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    return has_history and leaf.grad_fn._sequence_nr() in nodes


def kinds_of(leaves: list[Any]) -> tuple[type, ...]:
    return tuple(torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)


def unfit_result(leaves: list[Any]) -> str:
    """Why a replay could not make such a result; empty if it could."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                return f"it returns a {type(leaf).__name__}"
        elif not isinstance(leaf, _RESULTS):
            return f"it returns a {type(leaf).__name__}, which may refer to tensors"
    return ""


def run_backwards_here(undo: Undo) -> None:
    """Backwards run in the calling thread, which is the one that is observed or recorded."""
    before = torch._C._is_multithreading_enabled()
    undo.append(functools.partial(torch._C._set_multithreading_enabled, before))
    torch._C._set_multithreading_enabled(False)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def calling_line() -> str:
    """Where the program's own code is now, in parentheses; empty if it is nowhere."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library_file(name):
            return f" ({name.rsplit('/', 1)[-1]}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def fate(old: torch.Tensor | None, new: torch.Tensor | None) -> str:
    if new is old:
        return "kept"
    return "none" if new is None else "made"


def _host_tensors(observer: Any, device: torch.device) -> str:
    """Why tensors on the CPU that the call used keep it from having a graph."""
    if device.type == "cpu":
        return ""
    for tensor, user, is_written, size in observer.host_tensors():
        if tensor is None and size <= _LARGEST_NUMBER:
            continue  # an operator's, made of a number
        if is_written:
            return (
                f"operator {user} writes to a tensor on the CPU, which a replay would not do; if it is "
                "the step count of an optimizer, make that with fused=True or capturable=True"
            )
        if tensor is None or tensor.numel() > _LARGEST_HOST_TENSOR:
            return f"operator {user} reads a tensor on the CPU; move it to the GPU"
    return ""


def _survivors(observer: Any, known: list[torch.Tensor], device: torch.device) -> str:
    """Why memory that the call made, and that is neither a result nor a gradient, keeps it from having
    a graph: a replay would not renew it."""
    makers = observer.makers_of_survivors(known, device)
    if makers:
        gc.collect()  # it may only be part of a cycle
        makers = observer.makers_of_survivors(known, device)
    if not makers:
        return ""
    more = f" and {len(makers) - 1} more" if len(makers) > 1 else ""
    return (
        f"it keeps a tensor from operator {makers[0]}{more}, which replays would not renew; return it"
    )
