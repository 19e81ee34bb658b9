"""The ``torch.compile`` backend.

Inductor compiles; PyGraph owns one step of it. ``compile_fx`` accepts a function for the innermost
compilation, which forward, lazily compiled backward, inference and cache hits all pass through. Ours
lets Inductor cut the program into partitions that are fit for CUDA graphs but keeps its own graph
runtime off, then replaces each partition's function by a
:class:`~pygraph.partition.partition.Partition`. Inductor's kernels get barriers that they lack
(:mod:`pygraph.compile.barriers`), and patches make PyTorch's work around a call cheaper
(:mod:`pygraph.torch_patches`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pygraph import observations, polyfills, runtime, torch_patches, uncapturable
from pygraph import options as options_module
from pygraph.compile import barriers, wrapper_bypass
from pygraph.observations import Applied, Observation
from pygraph.options import BackendConfig
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Kind, PartitionInfo
from pygraph.uncapturable import Compilation

log = logging.getLogger("pygraph")

# In the key of Inductor's cache: code made for us is not mixed up with other backends', nor with what
# versions of PyGraph made that generated other kernels.
_CACHE_TAG = "pygraph-0.12"


_READS_RANDOM_STATE_ON_HOST = (
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_efficient_attention_backward",
)


class Backend:
    """The object behind the name ``"pygraph"``; called by ``torch.compile``."""

    compiler_name = "pygraph"

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compiles one FX graph.

        mode: as Inductor's; "max-autotune-no-cudagraphs" turns graphs off.
        options: Inductor's options, and ``pygraph.*`` (:class:`pygraph.options.Options`).
        Raises ValueError for an unknown mode or option.
        """
        polyfills.register()
        config = options_module.parse(mode, options)
        reason = runtime.unavailable_reason()
        if not config.graphs or reason is not None:
            if reason is not None:
                runtime.notice_once(f"PyGraph runs this program with plain Inductor: {reason}")
            return _compile_plain(gm, example_inputs, config)
        compilation = Compilation(uncapturable.names())
        function = _compile_with_graphs(gm, example_inputs, config, compilation)
        compilation.add_guard(gm)
        torch_patches.apply(gm, config.own.patches)
        return function

    def transforms_for(
        self, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, ...]:
        """Names of the transformations that a program compiled with these arguments gets."""
        config = options_module.parse(mode, options)
        return config.own.transforms if config.graphs else ()

    def reset(self) -> None:
        """Drops all captured graphs; ``torch._dynamo.reset()`` calls this."""
        runtime.reset()


def _compile_plain(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: BackendConfig
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with _our_kernels():
            return compile_fx_inner(gm, inputs, **kwargs)

    patches = {**config.inductor, "triton.cudagraphs": False}
    with _our_kernels():
        return compile_fx(  # type: ignore[no-any-return]
            gm, example_inputs, inner_compile=inner_compile, config_patches=patches
        )


@contextlib.contextmanager
def _our_kernels() -> Iterator[None]:
    """What Inductor compiles here, in this thread, has our barriers, and so has what its caches give.

    Entered anew in every thread and compilation: backward is compiled in autograd's threads.
    """
    tag = torch.compiler.config.patch(cache_key_tag=_CACHE_TAG)  # type: ignore[attr-defined]
    with tag, barriers.in_generated_kernels():
        yield


def _compile_with_graphs(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    config: BackendConfig,
    compilation: Compilation,
) -> Callable[..., Any]:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.utils import BoxedBool

    from pygraph import operators
    from pygraph.fx_passes.graph_pass import GraphPass

    patches = {
        **config.inductor,
        "triton.cudagraphs": True,
        "graph_partition": True,
        "custom_should_partition_ops": [
            *_inductor_option(config, "custom_should_partition_ops"),
            *operators.outside_of_graphs(),
            *compilation.cuts,
        ],
    }
    user_pass = _inductor_option(config, "post_grad_custom_post_pass")
    observation = observations.current()
    if observation is not None:
        observation.note_break(getattr(gm, "compile_subgraph_reason", None))
        patches["force_disable_caches"] = True  # a program from the cache would tell nothing
    found: list[wrapper_bypass.Shortcut | None] = []  # one per graph compiled within compile_fx

    def scope() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        # A hit in AOTAutograd's cache would skip inner_compile, and with it PyGraph.
        stack.enter_context(
            functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)
        )
        stack.enter_context(inductor_config.patch(patches))
        stack.enter_context(_our_kernels())
        return stack

    def inner_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        on_host = _random_state_inputs(gm)  # before Inductor changes the graph
        kind = _kind_of(kwargs)
        graph_pass = GraphPass(
            enabled=frozenset(config.own.transforms),
            user_pass=user_pass,
            watch=functools.partial(_note_graph, kind, observation),
            outermost=gm,
        )
        noted = len(observation.graphs) if observation else 0
        with scope(), inductor_config.patch(post_grad_custom_post_pass=graph_pass):
            # The box off: no CUDAGraph Trees, and Inductor realigns misaligned inputs itself.
            compiled = compile_fx_inner(gm, inputs, **{**kwargs, "cudagraphs": BoxedBool(False)})
        if observation is not None:
            compilation.graphs += observation.graphs[noted:]
        found.append(_attach(compiled, config, compilation, len(inputs), on_host, kwargs))
        return compiled

    argument_count = len(example_inputs)
    with scope():
        function = compile_fx(gm, example_inputs, inner_compile=inner_compile)
    if len(found) == 1 and found[0] is not None and found[0].input_count == argument_count:
        return found[0].around(function)
    return function  # type: ignore[no-any-return]


def _note_graph(
    kind: Kind, observation: Observation | None, graph: torch.fx.Graph, applied: list[Applied]
) -> None:
    """For the report and the summary, if one is made."""
    if observation is not None:
        observation.note_graph(kind, graph, applied)
    if observations.tally is not None:
        with runtime.harmless("counting operations"):
            observations.tally.note_graph(graph)


def _attach(
    compiled: Any,
    config: BackendConfig,
    compilation: Compilation,
    input_count: int,
    on_host: frozenset[int],
    kwargs: dict[str, Any],
) -> wrapper_bypass.Shortcut | None:
    """Replaces every partition function of a compiled FX graph by a Partition.

    Returns a way around all Python wrappers, where there is one.
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
        log.warning("Inductor's partition maps do not fit its partitions; left uncaptured")
        return None
    device = next(iter(compiled.device_idxs))
    static = set(kwargs.get("static_input_idxs") or ())
    mutated = set(compiled.mutated_input_idxs)
    kind = _kind_of(kwargs)
    program = compiled._fx_graph_cache_key or ""
    route = None
    if len(maps) == 1:
        route = wrapper_bypass.find_route(runner, input_count, len(maps[0].output_index_mapping))

    def wrap(number: int) -> Callable[[Callable[..., Any]], Any]:
        mapping = route.inputs if route is not None else maps[number].input_index_mapping
        info = PartitionInfo(
            name=f"{kind}{'' if len(maps) == 1 else f' part {number}'}",
            device=device,
            argument_count=len(mapping),
            counts_numbers=route is not None,
            static=frozenset(i for i, source in enumerate(mapping) if source in static),
            mutated=frozenset(i for i, source in enumerate(mapping) if source in mutated),
            on_host=frozenset(i for i, source in enumerate(mapping) if source in on_host),
            kind=kind,
            saved=_saved_outputs(route) if kind == "forward" else (),
            program=f"{program} part {number}" if program else "",
        )
        return lambda function: Partition(function, info, config.own, compilation).callable

    if observations.tally is not None:
        observations.tally.note_program()
    compiled.recursively_apply_fns([wrap(number) for number in range(len(maps))])
    if route is not None:
        compiled.current_callable = runtime.engine().whole_graph_callable(
            runner.partitions[0],
            compiled.current_callable,
            True,  # called with one list
            input_count,
            route.inputs,
            route.outputs,
            route.sent,
        )
        if kind == "inference" and wrapper_bypass.is_plain_inference(input_count):
            return wrapper_bypass.Shortcut(runner.partitions[0], input_count, route)
    return None


def _kind_of(kwargs: dict[str, Any]) -> Kind:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


def _inductor_option(config: BackendConfig, name: str) -> Any:
    """The user's value: of this compilation, or of the process."""
    return config.inductor.get(name, getattr(torch._inductor.config, name))


def _random_state_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Inputs that memory-efficient attention's backward reads on the host unless one captures."""
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


def _saved_outputs(route: wrapper_bypass.Route | None) -> tuple[int, ...]:
    """Partition outputs that AOTAutograd saves for backward and nothing else uses."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if route is None or metadata is None:
        return ()

    def made(outputs: Sequence[wrapper_bypass.Output | None]) -> set[int]:
        return {output[1] for output in outputs if output is not None and output[0]}

    visible = made(route.outputs[: metadata.num_forward])
    saved = made(route.outputs[metadata.num_forward :])
    return tuple(sorted(saved - visible))


backend = Backend()
polyfills.register()  # for programs whose first graph calls such a function
torch_patches.install()  # before torch.compile wraps the first program
