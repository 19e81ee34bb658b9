"""Gives a compiled FX graph its partitions: each partition's function becomes a
:class:`~pygraph.partition.partition.Partition`.

The graph was compiled just now, or comes from Inductor's cache, or from AOTAutograd's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph import observations, runtime
from pygraph.compile import wrapper_bypass
from pygraph.compile.warm_start import Facts
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Kind, PartitionInfo
from pygraph.uncapturable import Compilation

_READS_RANDOM_STATE_ON_HOST = (
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_efficient_attention_backward",
)


def attach(
    compiled: Any,
    options: Options,
    compilation: Compilation,
    facts: Facts,
    kwargs: dict[str, Any],
    metadata: Any,
    is_loaded: bool = False,
) -> wrapper_bypass.Shortcut | None:
    """Replaces every partition function of a compiled FX graph by a Partition.

    kwargs: the arguments with which Inductor was called to compile the graph.
    metadata: AOTAutograd's metadata of the program; None if there is none.
    is_loaded: whether it comes from AOTAutograd's cache (warm_programs.py: with nothing but PyTorch's
    operators, whose code is in the key).
    Returns a callable that bypasses all Python wrappers, or None if that is not possible.
    """
    from torch._inductor.output_code import CompiledFxGraph

    if type(compiled) is not CompiledFxGraph:  # nothing was compiled, or a debugging wrapper
        return None
    maps = compiled.partition_maps
    runner = compiled.compiled_fn_runner
    if not maps or runner is None or compiled.recursively_apply_fns is None:
        return None
    if len(compiled.device_idxs) != 1:
        runtime.notice_once("PyGraph leaves a graph over several devices uncaptured")
        return None
    if len(maps) != len(runner.partitions):
        runtime.log.warning("Inductor's partition maps do not fit its partitions; left uncaptured")
        return None
    device = next(iter(compiled.device_idxs))
    static = set(kwargs.get("static_input_idxs") or ())
    mutated = set(compiled.mutated_input_idxs)
    kind = kind_of(kwargs)
    program = compiled._fx_graph_cache_key or ""
    route = None
    if len(maps) == 1:
        route = wrapper_bypass.find_route(runner, facts.input_count, len(maps[0].output_index_mapping))

    def wrap(number: int) -> Callable[[Callable[..., Any]], Any]:
        mapping = route.inputs if route is not None else maps[number].input_index_mapping
        info = PartitionInfo(
            name=f"{kind}{'' if len(maps) == 1 else f' part {number}'}",
            device=device,
            argument_count=len(mapping),
            counts_numbers=route is not None,
            static=frozenset(i for i, source in enumerate(mapping) if source in static),
            mutated=frozenset(i for i, source in enumerate(mapping) if source in mutated),
            on_host=frozenset(i for i, source in enumerate(mapping) if source in facts.on_host),
            kind=kind,
            saved=_saved_outputs(route, metadata) if kind == "forward" else (),
            program=f"{program} part {number}" if program else "",
            is_loaded=is_loaded,
        )
        return lambda function: Partition(function, info, options, compilation).callable

    if observations.tally is not None:
        observations.tally.note_program()
    compiled.recursively_apply_fns([wrap(number) for number in range(len(maps))])
    if route is not None:
        shortcut = wrapper_bypass.Shortcut(runner.partitions[0], facts.input_count, route)
        compiled.current_callable = shortcut.callable_with(compiled.current_callable, True)
        if kind == "inference" and wrapper_bypass.is_plain_inference(metadata, facts.input_count):
            return shortcut
    return None


def kind_of(kwargs: dict[str, Any]) -> Kind:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


def places_its_work_itself(gm: torch.fx.GraphModule) -> bool:
    """Whether the program uses streams (``torch.cuda.stream``) or memory pools of its own, and Inductor
    generates code for them (torch/_inductor/stream_utils.py, not in PyTorch 2.11).

    Such code holds the streams' objects, including the stream on which the program is called. In a
    recording that is not the stream that records.
    """
    if importlib.util.find_spec("torch._inductor.stream_utils") is None:
        return False
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            placement = node.meta.get("custom") or {}
            operator = getattr(node.target, "namespace", "")
            if operator == "streams" or "stream" in placement or "mempool" in placement:
                return True
    return False


def random_state_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Inputs that the backward of memory-efficient attention reads on the host unless it is
    captured."""
    placeholders = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found = set()
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name not in _READS_RANDOM_STATE_ON_HOST:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.name in ("philox_seed", "philox_offset") and value in placeholders:
                found.add(placeholders[value])
    return frozenset(found)


def current_metadata() -> Any:
    """AOTAutograd's metadata of the program that is being compiled; None if there is none."""
    context = torch._guards.TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _saved_outputs(route: wrapper_bypass.Route | None, metadata: Any) -> tuple[int, ...]:
    """Partition outputs that AOTAutograd saves for backward and nothing else uses."""
    if route is None or metadata is None:
        return ()

    def made(outputs: Sequence[wrapper_bypass.Output | None]) -> set[int]:
        return {output[1] for output in outputs if output is not None and output[0]}

    visible = made(route.outputs[: metadata.num_forward])
    saved = made(route.outputs[metadata.num_forward :])
    return tuple(sorted(saved - visible))
