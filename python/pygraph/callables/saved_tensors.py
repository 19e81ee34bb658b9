"""What autograd saves in a call for the backward, taken out of its graph.

Hooks for saved tensors put a *handle* in the place of each tensor that autograd saves. When the call is
over, the tensors are taken from the handles, and each gets a *place*: where a later run of the same
graph finds it. So the graph that is left holds no memory, and can be run again on other tensors.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from pygraph import runtime
from pygraph.callables.step_function import NotGraphable
from pygraph.undoing import Undo

# Where a saved tensor lies. The program may give tensors other memory between forward and backward.
# Where autograd has saved the tensor itself, it uses that; where it has saved another one in the same
# memory, such as a view, it has kept the memory. So these are told apart.
ARGUMENT, STATE = "argument", "state"
IN_ARGUMENT, IN_STATE = "in an argument", "in the state"
MADE, EMPTY, CONSTANT = "made", "empty", "constant"

_CHECKPOINTING = (torch.utils.checkpoint.__file__,)


@dataclasses.dataclass(frozen=True)
class Place:
    """Of a saved tensor. number: which argument, storage of the state, or output. offset: in elements,
    from the first one of the argument or of the flat tensor that covers the storage. owner: of a tensor
    of the state itself, which one of those that have the storage."""

    kind: str
    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    owner: int = 0

    def view_of(self, base: torch.Tensor) -> torch.Tensor:
        """The saved tensor, where ``base`` is what the place lies in."""
        if self.kind == ARGUMENT and not (self.is_conj or self.is_neg):
            return base.detach()  # with the layout that it has now
        if base.dtype != self.dtype:
            base = base.view(self.dtype)  # a flat tensor
        view = base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class Handle:
    """In the place of a saved tensor. tensor: until the call is over. number: of its place, then.
    identity: of the tensor's Python object, which may be gone."""

    __slots__ = ("__weakref__", "identity", "number", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()  # not itself: the graph would hold itself
        self.identity = id(tensor)
        self.version = tensor._version
        self.number = -1


_run = threading.local()  # `tensors`: by place, while a graph is run again in this thread


class SavedTensors:
    """Those of one call. recomputes: whether checkpointing has saved some, whose backward runs Python.
    leaves_hooks: whether hooks were left open that were entered in the call. Not thread-safe."""

    def __init__(self) -> None:
        self.recomputes = False
        self.leaves_hooks = False
        self._handles: list[weakref.ref[Handle]] = []

    def begin_saving(self, undo: Undo, is_rehearsal: bool = False) -> None:
        """Hooks for saved tensors, until the steps of ``undo`` are made. Other hooks that are open then
        stay so, but after a rehearsal."""
        pack = self._pack

        def end() -> None:
            self.leaves_hooks |= runtime.engine().remove_saved_tensors_hooks(pack, is_rehearsal)

        undo.append(end)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> Handle:
        # (Checkpointing has a node for what it saves, which does not show in the graph.)
        caller = sys._getframe(1)
        for frame in (caller, caller.f_back):
            self.recomputes |= frame is not None and frame.f_code.co_filename in _CHECKPOINTING
        handle = Handle(tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    def handles(self) -> list[Handle]:
        """Those that the graph still has."""
        found = [reference() for reference in self._handles]
        return [handle for handle in found if handle is not None]


def _unpack(handle: Handle) -> torch.Tensor:
    if handle.tensor is None:
        tensor: torch.Tensor = _run.tensors[handle.number]
        return tensor
    if handle.tensor._version != handle.version:  # PyTorch does not look where there are hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: it is at version {handle.tensor._version}; expected version {handle.version}"
        )
    return handle.tensor


def run_on(tensors: Sequence[torch.Tensor], undo: Undo) -> None:
    """A graph runs again in this thread. tensors: those that it saved, by place."""
    before = getattr(_run, "tensors", None)
    undo.append(lambda: setattr(_run, "tensors", before))
    _run.tensors = tensors


@dataclasses.dataclass
class Saved:
    """places: of what a call saved. made: flat tensors, for more outputs. constants: by place, tensors
    on the host that are part of the program, as its numbers are."""

    places: list[Place]
    made: list[torch.Tensor]
    constants: dict[int, torch.Tensor]


def take_out(
    handles: list[Handle],
    arguments: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    owners: dict[int, list[torch.Tensor]],
    device: torch.device,
    known: Sequence[Place],
) -> Saved:
    """Finds the places. owners: by storage of the state, the program's tensors that have it. known:
    those of an earlier run, if there was one. The first run is a recording, in which attention's random
    state is on the GPU; otherwise it is on the CPU, where tensors are constants else. Raises
    NotGraphable."""
    sources = {_address(t): (IN_ARGUMENT, i, 0) for i, t in enumerate(arguments)}
    sources |= {_address(t): (IN_STATE, i, 0) for i, t in enumerate(state)}
    sources.pop(0, None)
    themselves = {id(t): (ARGUMENT, i, 0) for i, t in enumerate(arguments)}
    themselves |= {id(t): (STATE, i, n) for i, of in owners.items() for n, t in enumerate(of)}
    saved = Saved([], [], {})
    for number, handle in enumerate(handles):
        tensor = handle.tensor
        assert tensor is not None
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            raise NotGraphable("it saves a tensor for the backward whose memory is not known")
        if tensor._version != handle.version:
            raise NotGraphable("it writes to a tensor that its backward needs")
        was_made = number < len(known) and known[number].kind == MADE
        if tensor.device != device and not was_made:
            source = (CONSTANT, 0, 0)
            saved.constants[number] = tensor
        elif tensor.numel() == 0:
            source = (EMPTY, 0, 0)
        elif _address(tensor) in sources:
            source = themselves.get(handle.identity, sources[_address(tensor)])
        else:
            source = sources[_address(tensor)] = (MADE, len(saved.made), 0)
            saved.made.append(runtime.engine().flat_tensor(tensor))
        saved.places.append(place_of(tensor, source, arguments))
    return saved


def place_of(
    tensor: torch.Tensor, source: tuple[str, int, int], arguments: Sequence[torch.Tensor]
) -> Place:
    kind, number, owner = source
    offset = int(tensor.storage_offset())
    if kind in (ARGUMENT, IN_ARGUMENT):
        offset -= int(arguments[number].storage_offset())
        if arguments[number].dtype != tensor.dtype:
            raise NotGraphable("it saves an argument for the backward in another dtype")
    layout = tuple(tensor.shape), tuple(tensor.stride()), offset
    return Place(kind, number, tensor.dtype, *layout, tensor.is_conj(), tensor.is_neg(), owner)


def _address(tensor: torch.Tensor) -> int:
    """Of its storage. (No Python object for the storage is made: it would count as a holder.)"""
    return runtime.engine().flat_tensor(tensor).data_ptr() if tensor.numel() > 0 else 0


def address_of(tensor: Any) -> int:
    """Of a tensor's storage; 0 for what has no memory."""
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    return _address(tensor) if is_plain else 0
