"""Autograd's graph of one run of a callable, without the memory that it used.

    the program's graph     loss <- one node <- arguments, parameters
    the kept graph          results <- ... <- leaves of its own, one for each argument or parameter

The backward of the one node runs the kept graph, on the tensors that the forward has saved
(saved_tensors.py). In a replay a CUDA graph does, which was recorded while the kept graph ran.

Autograd runs nodes on the stream on which they were made, so there is a kept graph for each stream: the
one of recordings, and those of calls. A backward on a stream without a graph runs the graph of a stream
that PyTorch never destroys, such as the default stream. If there is none, it runs that of recordings;
no thread records meanwhile, because the work would become a part of that thread's graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pygraph import runtime
from pygraph.callables.host.kinds import is_of
from pygraph.callables.observed_call import run_backwards_here
from pygraph.callables.saved_tensors import CONSTANT, EMPTY, STATE, Place, Saved, address_of, run_on
from pygraph.callables.step_function import NotGraphable
from pygraph.gpu import current
from pygraph.undoing import Undo, undoing

# Results of these share memory, but no element.
_SPLITS = ("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0")


class Stream(NamedTuple):
    """is_lasting: whether it is one of PyTorch's, which are not destroyed. Recordings have another."""

    handle: int
    is_lasting: bool


@dataclasses.dataclass(frozen=True)
class KeptGraph:
    """edges: of results that require gradients. leaves: by position among ``Structure.ends``.
    constants: by place."""

    edges: list[GradientEdge]
    leaves: list[GradientEdge]
    constants: dict[int, torch.Tensor]
    stream: Stream


@dataclasses.dataclass
class Structure:
    """What all runs of a callable with arguments of one layout have in common.

    places: of saved tensors. made: how many more outputs the forward has for them. ends: positions,
    among the tensors that gradients could flow to, of those that they flow to. results: positions of
    those that require gradients, each tensor once. repeated: by position, where the same result is
    first. shared: results without a gradient in the memory of one with: its position, and the layout.
    checked: positions of results in memory that is saved. python: whether Python runs in the backward.

    on_host: numbers of what is made on the CPU in calls without a graph. patterns: how many patterns of
    gradients have partitions. is_lasting: whether it is that of more calls than one. is_observed:
    whether a backward was, in which Python runs. graphs: by handle of their stream; the first is that
    of the recordings, which show the structure.
    """

    places: list[Place]
    made: int
    ends: list[int]
    results: list[int]
    repeated: dict[int, int]
    shared: dict[int, tuple[int, Any]]
    checked: list[int]
    python: bool
    on_host: set[int] = dataclasses.field(default_factory=set, compare=False)
    graphs: dict[int, KeptGraph] = dataclasses.field(default_factory=dict, compare=False)
    patterns: int = dataclasses.field(default=0, compare=False)
    is_lasting: bool = dataclasses.field(default=True, compare=False)
    is_observed: bool = dataclasses.field(default=False, compare=False)

    def of_kind(self, *kinds: str) -> list[int]:
        """The numbers of what saved tensors lie in."""
        return sorted({place.number for place in self.places if place.kind in kinds})


def survey(leaves: list[Any], ends: list[torch.Tensor], saved: Saved) -> Structure:
    """Describes a run, by the results, the tensors that gradients could flow to, and what was saved.
    Raises NotGraphable."""
    tensors = {i: x for i, x in enumerate(leaves) if is_of(x, torch.Tensor)}
    first = {id(x): i for i, x in reversed(tensors.items())}
    repeated = {i: first[id(x)] for i, x in tensors.items() if first[id(x)] != i}
    results = [i for i, x in tensors.items() if x.requires_grad and i not in repeated]
    reached, reaches_others, hooked = runtime.engine().survey_graph([leaves[i] for i in results], ends)
    if reaches_others or any(leaves[i].is_leaf for i in results):
        raise NotGraphable("gradients flow through it to a tensor that cannot be found")
    if hooked:
        raise NotGraphable(f"a hook waits for a gradient inside of it, at {hooked}")
    names = _names_of_python([leaves[i] for i in results])
    if any("CompiledFunction" in name for name in names):
        raise NotGraphable("a compiled function inside of it has a backward of its own")
    _check_memory(leaves, results)
    made = {address_of(flat) for flat in saved.made}
    shared = {}
    for i, x in tensors.items():
        base = next((j for j in results if address_of(leaves[j]) == address_of(x) != 0), None)
        if base is not None and not x.requires_grad:
            if x.dtype != leaves[base].dtype or x.is_conj() or x.is_neg():
                raise NotGraphable("a result is a view of another one in another dtype")
            shared[i] = (base, (tuple(x.shape), tuple(x.stride()), x.storage_offset()))
    checked = [i for i, x in tensors.items() if i not in repeated and address_of(x) in made]
    return Structure(
        saved.places, len(saved.made), list(reached), results, repeated, shared, checked, bool(names)
    )


def _names_of_python(results: list[torch.Tensor]) -> set[str]:
    """Of nodes whose backward is written in Python. Raises NotGraphable if gradients flow from one
    result to another: what the program does to those would not be seen."""
    # Held while they are compared: in some releases a node's Python object ends with its last user, and
    # another one may get its id.
    pending = [result.grad_fn for result in results]
    seen = {id(node): node for node in pending}
    numbers = [result.output_nr for result in results]
    edges = {(id(node), number) for node, number in zip(pending, numbers, strict=True)}
    names = set[str]()
    while pending:
        node = pending.pop()
        assert node is not None
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names.add(type(node).__name__)
        for following, number in node.next_functions:
            if (id(following), number) in edges:
                raise NotGraphable("a result is computed from another one, and both require gradients")
            if following is not None and id(following) not in seen:
                seen[id(following)] = following
                pending.append(following)
    return names


def _check_memory(leaves: list[Any], results: list[int]) -> None:
    """Writing to one result must not change another one, of which the program's graph knows nothing."""
    first: dict[int, Any] = {}
    for i in results:
        result = leaves[i]
        other = first.setdefault(address_of(result), result)
        if other is result or address_of(result) == 0:
            continue
        if other.grad_fn is not result.grad_fn or result.grad_fn.name() not in _SPLITS:
            raise NotGraphable("results that require gradients share memory")


def keep(
    structure: Structure,
    leaves: list[Any],
    ends: list[torch.Tensor],
    instead: list[torch.Tensor],
    constants: dict[int, torch.Tensor],
    stream: Stream,
) -> None:
    """Makes the graph of a run the kept one of its stream. Nothing else may use it any more. instead:
    leaves in place of the ends that are reached."""
    results = [leaves[i] for i in structure.results]
    runtime.engine().reroute_graph(results, [ends[i] for i in structure.ends], instead)
    edges = [get_gradient_edge(result) for result in results]
    own = [get_gradient_edge(leaf) for leaf in instead]
    structure.graphs[stream.handle] = KeptGraph(edges, own, constants, stream)


def run(
    structure: Structure,
    bases: dict[str, dict[int, torch.Tensor]],
    gradients: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    device: torch.device,
    exchanged: dict[tuple[int, int], torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of the needed ends, in the calling thread. bases: what saved tensors lie in, by kind
    and number. gradients: of the results. exchanged: by number and owner, tensors of the state that
    have other memory now."""
    stream = stream_of(device)
    graph = _graph_for(stream, list(structure.graphs.values()))
    is_elsewhere = graph.stream.handle != stream.handle
    tensors = []
    for i, place in enumerate(structure.places):
        if place.kind == CONSTANT:
            tensors.append(graph.constants[i])
        elif place.kind == EMPTY:
            tensors.append(
                torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=device)
            )
        elif place.kind == STATE and (place.number, place.owner) in exchanged:
            tensors.append(exchanged[place.number, place.owner])
        else:
            tensors.append(place.view_of(bases[place.kind][place.number]))
    pairs = zip(graph.edges, gradients, strict=True)
    given = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
    wanted = [leaf for leaf, is_needed in zip(graph.leaves, needed, strict=True) if is_needed]
    if not given or not wanted:
        return [None] * len(wanted)

    def differentiate(undo: Undo) -> tuple[torch.Tensor | None, ...]:
        if is_elsewhere and not graph.stream.is_lasting:
            runtime.begin_without_recordings(undo)
        run_backwards_here(undo)
        run_on(tensors, undo)
        return torch.autograd.grad(
            [edge for edge, _ in given],
            wanted,
            [gradient for _, gradient in given],
            retain_graph=True,
            allow_unused=True,
        )

    found = undoing(differentiate)
    if is_elsewhere:  # of memory that was allocated on that stream
        for gradient in found:
            if gradient is not None and gradient.is_cuda:
                gradient.record_stream(torch.cuda.current_stream(device))
    return list(found)


def _graph_for(stream: Stream, graphs: list[KeptGraph]) -> KeptGraph:
    """That of the stream, or else the latest of a stream that lasts. There is none where graphs are not
    verified, or where the program works on streams of its own: then that of recordings."""
    own = next((graph for graph in graphs if graph.stream.handle == stream.handle), None)
    lasting = next((graph for graph in reversed(graphs) if graph.stream.is_lasting), None)
    return own or lasting or graphs[0]


def stream_of(device: torch.device) -> Stream:
    """The current one."""
    if device.type != "cuda":
        return Stream(0, True)
    stream = torch.cuda.current_stream(device)
    return Stream(stream.cuda_stream, current.lasts(stream))
