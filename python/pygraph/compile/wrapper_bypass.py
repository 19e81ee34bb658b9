"""Bypasses Python wrappers of graphs that consist of one partition.

Inductor's generated wrapper is called once with opaque objects instead of tensors, and with spies
instead of the partition and of the function that makes views. If all that the wrapper does is to pass
its arguments to the partition, and to return the partition's results, its own arguments, or views of
them, then the objects show in which order it passes and returns them. It may send CPU values to the GPU
first, by PyGraph's operators (:mod:`pygraph.operators`).

The wrapper sees only the names listed here, and no builtin function: any other call raises, such as an
operator with effects and without tensors. So does any question to an opaque object, such as whether a
size is the expected one. Then the graph keeps its wrapper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime, signal_exceptions

if TYPE_CHECKING:
    from pygraph import _engine

# Size and strides, in elements, and offset from the first element of the tensor that is viewed.
View = tuple[list[int], list[int], int]
Output = tuple[bool, int, View | None]
# What is sent to the GPU before the partition is called: the graph arguments, the device, and whether
# they are numbers, sent as one vector.
Sent = tuple[list[int], torch.device, bool]


@dataclasses.dataclass(frozen=True)
class Route:
    """How a graph's arguments and results map to those of its one partition.

    inputs: partition argument i is graph argument ``inputs[i]``; beyond the last of these, what was
    sent to the GPU first, in the order of ``sent``.
    outputs: graph result j is ``(True, k, view)``: partition result k, or ``(False, k, view)``: graph
    argument k; itself if the view is None. Or the result is None (of inputs without a gradient).
    """

    inputs: list[int]
    outputs: list[Output | None]
    sent: list[Sent] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Shortcut:
    """Calls a compiled function's one partition directly with the function's arguments."""

    partition: _engine.GraphedCallable
    input_count: int
    route: Route

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A callable that replays if it can and calls ``function`` otherwise, untraced by Dynamo."""
        untraced = torch.compiler.disable(function, reason="compiled")  # type: ignore[no-untyped-call]
        return self.callable_with(untraced, takes_list=False)

    def callable_with(self, fallback: Callable[..., Any], takes_list: bool) -> Callable[..., Any]:
        """takes_list: whether it is called with one list, or else with the arguments one by one."""
        route = self.route.inputs, self.route.outputs, self.route.sent
        return runtime.engine().whole_graph_callable(
            self.partition, fallback, takes_list, self.input_count, *route
        )


def is_plain_inference(metadata: Any, input_count: int) -> bool:
    """Whether AOTAutograd's wrappers have nothing to do around an inference graph. metadata:
    AOTAutograd's, of the program; None if there is none."""
    if metadata is None:
        return False
    return (
        len(metadata.input_info) == input_count
        and not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
        and metadata.num_mutated_inp_runtime_indices == 0
        and metadata.num_outputs_aliased == 0
        and metadata.num_intermediate_bases == 0
        and metadata.num_outputs_rng_offset == 0
        and not metadata.tokens
        and not metadata.dynamic_outputs
        and metadata.grad_enabled_mutation is None
        and all(type(meta).__name__ == "PlainTensorMeta" for meta in metadata.subclass_inp_meta)
    )


class _Opaque:
    """Stands for a tensor or a size. It can be passed on; any question to it raises TypeError."""

    def _refuse(self, *args: object) -> Any:
        raise TypeError("the wrapper asks for a value")

    __eq__ = __ne__ = __bool__ = __hash__ = _refuse


class _Spies:
    """Stand-ins for the wrapper's tensors, for the partition, and for the functions that the wrapper
    calls."""

    def __init__(self, input_count: int, output_count: int) -> None:
        self.given = [_Opaque() for _ in range(input_count)]
        self._made = [_Opaque() for _ in range(output_count)]
        self._sent: list[tuple[object, Sent]] = []
        self._views: list[tuple[object, object, View]] = []  # the view, its base
        self._calls: list[list[object]] = []

    def globals(self, real: dict[str, Any]) -> dict[str, Any]:
        """All names of its module that the wrapper may use."""
        cuda = types.SimpleNamespace(_DeviceGuard=contextlib.nullcontext, set_device=lambda index: None)
        ours = types.SimpleNamespace(
            to_device=types.SimpleNamespace(
                default=lambda host, device: self._send([host], device, False)
            ),
            scalars_to_device=types.SimpleNamespace(
                default=lambda scalars, device: self._send(scalars, device, True)
            ),
        )
        ops = types.SimpleNamespace(pygraph=ours)
        return {
            "__builtins__": {},
            "torch": types.SimpleNamespace(ops=ops, cuda=cuda, device=torch.device, **_DTYPES),
            "device": torch.device,
            "reinterpret_tensor": self._reinterpret_tensor,
            # Sizes and alignments of what PyGraph's operators return are known to be right.
            **{name: self._check for name in _CHECKS if name in real},
        }

    def partition(self, args: list[object]) -> tuple[object, ...]:
        self._calls.append(list(args))
        return tuple(self._made)

    def _send(self, host: list[object], device: torch.device, is_vector: bool) -> object:
        positions = [self._position(tensor) for tensor in host]
        self._sent.append((_Opaque(), (positions, device, is_vector)))
        return self._sent[-1][0]

    def _reinterpret_tensor(self, base: object, size: Any, stride: Any, offset: int = 0) -> object:
        self._views.append((_Opaque(), base, (list(size), list(stride), offset)))
        return self._views[-1][0]

    def _check(self, tensor: object, *args: Any) -> None:
        if all(tensor is not result for result, _ in self._sent):
            raise TypeError("the wrapper checks a tensor")

    def _position(self, tensor: object) -> int:
        """The position of a graph argument. Raises ValueError if the object is none."""
        return [id(argument) for argument in self.given].index(id(tensor))

    def route(self, results: Any) -> Route | None:
        """The route, from the calls that the wrapper made and the result that it returned."""
        if len(self._calls) != 1:
            return None
        arguments = [*self.given, *(result for result, _ in self._sent)]
        position = {id(argument): i for i, argument in enumerate(arguments)}
        inputs = [position.get(id(argument)) for argument in self._calls[0]]
        if any(i is None for i in inputs):
            return None
        sources = {id(argument): (False, i) for i, argument in enumerate(self.given)}
        sources |= {id(result): (True, i) for i, result in enumerate(self._made)}
        views = {id(view): (base, how) for view, base, how in self._views}
        outputs: list[Output | None] = []
        for result in results:
            base, view = views.get(id(result), (result, None))
            if result is None:
                outputs.append(None)
            elif id(base) in sources and _is_fixed(view):
                outputs.append((*sources[id(base)], view))
            else:
                return None
        return Route([i for i in inputs if i is not None], outputs, [how for _, how in self._sent])


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_CHECKS = ("assert_size_stride", "assert_alignment", "assert_tensor_metadata")  # by release


def find_route(runner: Any, input_count: int, output_count: int) -> Route | None:
    """The route through ``runner.call``, or None if it is more than a reordering and views.

    runner: Inductor's generated Runner, whose one partition returns ``output_count`` objects.
    """
    spies = _Spies(input_count, output_count)
    try:
        # A copy of the function: nothing changes for whoever runs the original meanwhile.
        call = runner.call.__func__
        names = spies.globals(call.__globals__)
        probe = types.FunctionType(call.__code__, names)
        return spies.route(
            probe(types.SimpleNamespace(partitions=[spies.partition]), list(spies.given))
        )
    except Exception as error:
        signal_exceptions.pass_on(error)
        runtime.log.info("a graph keeps Inductor's wrapper: %s: %s", type(error).__name__, error)
        return None


def _is_fixed(view: View | None) -> bool:
    """Whether a view is the same at every call: opaque objects among its sizes are arguments."""
    return view is None or all(type(n) is int for n in (*view[0], *view[1], view[2]))
