"""One uncaptured call of a callable, observed: what it used, and what it left behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from pygraph import runtime, signal_exceptions
from pygraph.callables import refusals
from pygraph.callables.gpu_effects import SEEDS_GPU, gpu_seed, is_seeded, recorded_event
from pygraph.callables.host.host_output import watch_output
from pygraph.callables.host.host_state import HostState
from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.random_states import random_state
from pygraph.callables.host.schedulers import SchedulerUse, watch_schedulers
from pygraph.callables.host.user_code import calling_line
from pygraph.callables.inference_results import inference_among
from pygraph.callables.observation import (
    Form,
    Gradient,
    Observation,
    are_marked,
    attributes_of_gradients,
    fate,
    kinds_of,
    version_of,
)
from pygraph.callables.read_properties import read_property
from pygraph.callables.results import flattened
from pygraph.callables.results import unfit as unfit_to_replay
from pygraph.callables.signature import Arguments, layouts_of
from pygraph.undoing import Undo, undoing

if TYPE_CHECKING:
    from pygraph import _engine


def observed_call(
    call: Callable[[], Any],
    is_changed: Callable[[], bool],
    arguments: Arguments,
    before: HostState,
    watched: list[torch.Tensor],
    device: torch.device,
    passed: Any,
) -> Observation:
    """Makes the call. Raises what it raises. is_changed: tells afterwards whether the structure of the
    arguments is another one. before: the host's state before the call, of no use after it. watched:
    tensors whose gradients are looked at. passed: what ``arguments`` were taken from."""
    uncapturable: list[str] = []
    missed: list[BaseException] = []

    def note(name: str) -> None:
        try:
            from pygraph import operators  # which needs the engine when it is imported

            is_collective = operators.is_collective(name)
            what = "ranks communicate in it" if is_collective else "it waits for the GPU"
            uncapturable.append(f"{what}: {name}{calling_line()}")
        except BaseException as error:  # the engine would drop it
            missed.append(error)

    def body(undo: Undo) -> tuple[Any, set[str], SchedulerUse, _engine.CallObserver]:
        run_backwards_here(undo)
        output = watch_output(undo)
        schedulers = watch_schedulers(undo, before.found.schedulers)
        undo.append(torch.clear_autocast_cache)
        observer = runtime.engine().CallObserver(note)
        undo.append(observer.end)  # at once: no interrupt comes in between
        return call(), output, schedulers, observer

    drawn, layouts, hooks = random_state(), layouts_of(arguments), _saved_tensors_hooks()
    modes, seed = _modes(), gpu_seed(device)
    versions = _versions(arguments)
    gradients = [(tensor, tensor.grad, version_of(tensor.grad)) for tensor in watched]
    marks = attributes_of_gradients(watched)
    histories = {id(t): t.grad_fn for t in before.found.tensors.values()}
    torch.clear_autocast_cache()  # what is in it was made in no call
    result, output, schedulers, observer = undoing(body)
    if missed:
        raise missed[0]
    nodes = set(observer.backward_nodes)
    results, spec = flattened(result)
    unfit = unfit_to_replay(result, results, passed, before)
    used = frozenset(i for i, leaf in enumerate(results) if not unfit and _is_used_up(leaf, nodes))
    results = [leaf.detach() if i in used else leaf for i, leaf in enumerate(results)]
    if used:
        result = pytree.tree_unflatten(results, spec)
    needing = [*results, *(arguments.tensors if torch.is_grad_enabled() else ())]
    is_differentiable = any(is_of(x, torch.Tensor) and x.requires_grad for x in needing)
    form = Form(spec, kinds_of(results), used, is_differentiable, inference_among(results))
    seen = Observation(result, form, before)
    written = sorted(schedulers.written, key=lambda path: ("._" in path, path))  # public ones first
    seen.effects = [*written, *sorted(output)]
    if layouts_of(arguments) != layouts:
        seen.effects.append("a tensor that is passed to it, beyond its contents")
    if is_changed():
        seen.effects.append("a container that is passed to it")
    try:
        _look_back(seen, before, observer, arguments, gradients, device)
        if are_marked(seen.gradients, marks):
            seen.effects.append("attributes of a gradient")
        seen.refusal = refusals.of_memory(seen, before, observer, arguments, device)
        if random_state() != drawn:
            seen.refusal, seen.effects = "it draws random numbers on the CPU", []
        elif _saved_tensors_hooks() != hooks:
            seen.refusal = "it leaves hooks for saved tensors open"
        elif _modes() != modes:
            seen.refusal = (
                "it leaves modes of PyTorch changed, such as those of gradients, autocast, default "
                "dtype or determinism; set them outside"
            )
        elif uncapturable or unfit:
            seen.refusal = uncapturable[0] if uncapturable else unfit
        elif property_ := read_property(seen.host.found, arguments.tensors):
            seen.refusal = property_
        elif event := recorded_event(seen.host.found):
            seen.refusal = event
        elif is_seeded(seed, gpu_seed(device)):
            seen.refusal = SEEDS_GPU
        elif schedulers.read:
            seen.refusal = (
                f"it reads {min(schedulers.read)}, a learning-rate scheduler; read it outside"
            )
        elif path := refusals.new_history(seen.host, histories, nodes):
            seen.refusal = f"it leaves {path} with a history in autograd; write to it detached values"
        elif _versions(arguments) != versions:
            seen.refusal = "it writes to an argument that requires a gradient"
    except (MemoryError, torch.OutOfMemoryError):  # a later call may be looked at
        seen.is_complete = False
    except Exception as error:  # of what the walk has met; the call is made
        signal_exceptions.pass_on(error)
        seen.refusal = runtime.brief(error)
    return seen


def _modes() -> tuple[Any, ...]:
    """Of the thread, and of the process."""
    return runtime.engine().modes(), torch.is_anomaly_enabled()


def _saved_tensors_hooks() -> Any:
    """The innermost ones of the thread."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks and tuple(map(id, hooks))


def _look_back(
    seen: Observation,
    before: HostState,
    observer: _engine.CallObserver,
    arguments: Arguments,
    gradients: list[tuple[torch.Tensor, torch.Tensor | None, int | None]],
    device: torch.device,
) -> None:
    """Fills in what a call has used and changed. gradients: the watched tensors, with their gradients
    from before and the versions of these."""
    after = seen.host = before.now()
    seen.effects = [*before.changes(after), *seen.effects]
    seen.gradients = [
        Gradient(
            tensor,
            is_used=_is_used(old, arguments, observer),
            is_counted=version_of(old) != version,
            after=fate(old, tensor.grad),
        )
        for tensor, old, version in gradients
    ]
    old_gradients = [gradient for _, gradient, _ in gradients if gradient is not None]
    new_gradients = [tensor.grad for tensor, _, _ in gradients if tensor.grad is not None]
    reachable = list(after.found.tensors.values())
    excluded = [*arguments.tensors, *old_gradients, *new_gradients]
    seen.state = runtime.engine().State(observer, reachable, excluded, device)


def _versions(arguments: Arguments) -> list[int]:
    """How often operators have written to arguments that require gradients."""
    if not torch.is_grad_enabled():
        return []
    return [t._version for t in arguments.tensors if t.requires_grad and not t.is_inference()]


def _is_used(
    gradient: torch.Tensor | None, arguments: Arguments, observer: _engine.CallObserver
) -> bool:
    """Whether a gradient from before is an input of its own."""
    if gradient is None or any(gradient is tensor for tensor in arguments.tensors):
        return False
    return observer.has_used(gradient)


def _is_used_up(leaf: Any, nodes: set[int]) -> bool:
    """Whether the backward of a result was run in the call. ``nodes``: the numbers of what ran.

    Such a result is of no more use to autograd, and would keep its nodes, with the stream that they
    were made on, until the next call.
    """
    has_history = is_of(leaf, torch.Tensor) and leaf.grad_fn is not None
    return has_history and leaf.grad_fn._sequence_nr() in nodes


def run_backwards_here(undo: Undo) -> None:
    """Backwards run in the calling thread, which is the one that is observed or recorded."""
    before = torch._C._is_multithreading_enabled()
    undo.append(functools.partial(torch._C._set_multithreading_enabled, before))
    torch._C._set_multithreading_enabled(False)
