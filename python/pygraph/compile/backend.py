"""The ``torch.compile`` backend.

Inductor compiles; PyGraph owns one step of it. ``compile_fx`` accepts a function for the innermost
compilation, which forward, lazily compiled backward, inference and hits in Inductor's cache all pass
through (hits in AOTAutograd's cache: :mod:`pygraph.compile.warm_start`). Ours lets Inductor cut the
program into partitions that are fit for CUDA graphs but keeps its own graph runtime off, then replaces
each partition's function (:mod:`pygraph.compile.attachment`). Inductor's kernels get barriers that
they lack (:mod:`pygraph.compile.barriers`), and patches make PyTorch's work around a call cheaper
(:mod:`pygraph.torch_patches`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph import observations, polyfills, runtime, torch_patches, uncapturable
from pygraph import options as options_module
from pygraph.compile import (
    attachment,
    barriers,
    kernel_origins,
    warm_programs,
    warm_start,
    wrapper_bypass,
)
from pygraph.compile.warm_start import Facts
from pygraph.observations import Applied, Observation
from pygraph.options import BackendConfig
from pygraph.partition.signature import Kind
from pygraph.torch_patches import stored_keys
from pygraph.uncapturable import Compilation

# In the keys of the compiler's caches: of code for us, which is not mixed up with other backends', nor
# with that of versions of PyGraph that generated other kernels.
_CODE = "0.12"


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
        name: str | None = None,
    ) -> Callable[..., Any]:
        """Compiles one FX graph.

        mode: as Inductor's; "max-autotune-no-cudagraphs" turns graphs off.
        options: Inductor's options, and ``pygraph.*`` (:class:`pygraph.options.Options`).
        name: as in ``torch.compile`` of PyTorch 2.15; not used.
        Raises ValueError for an unknown mode or option.
        """
        polyfills.register()
        config = options_module.parse(mode, options)
        reason = runtime.unavailable_reason() or barriers.why_not() or None
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
        with barriers.in_generated_kernels():  # entered anew: backward is compiled in another thread
            return compile_fx_inner(gm, inputs, **kwargs)

    patches = {**config.inductor, **_cache_key(config), "triton.cudagraphs": False}
    with barriers.in_generated_kernels():
        return compile_fx(  # type: ignore[no-any-return]
            gm, example_inputs, inner_compile=inner_compile, config_patches=patches
        )


def _cache_key(config: BackendConfig, *more: object) -> dict[str, Any]:
    """Settings of Inductor that keep code with our barriers apart from other code in its caches."""
    from pygraph.fx_passes.cache_key import CacheKeyPass, beside

    name = "post_grad_custom_pre_pass"
    user_pass = _inductor_option(config, name)
    return {name: beside(user_pass, lambda p: CacheKeyPass(p, _CODE, *more), comes_first=True)}


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
    from pygraph.fx_passes.cache_key import beside
    from pygraph.fx_passes.graph_pass import GraphPass

    observation = observations.current()
    is_warm = observation is None and _may_be_warm(gm, example_inputs, config)
    key = warm_programs.missing_key(example_inputs) if is_warm else ()
    if attachment.places_its_work_itself(gm):
        key = ("on streams",)  # Inductor's key has the operators, but not where they run
    transforms = GraphPass(frozenset(config.own.transforms)).uuid()
    patches = {
        **config.inductor,
        **_cache_key(config, transforms, *key),
        "triton.cudagraphs": True,
        "graph_partition": True,
        "custom_should_partition_ops": [
            *_inductor_option(config, "custom_should_partition_ops"),
            *operators.outside_of_graphs(),
            *sorted(compilation.cuts),  # in the key, which other processes look for
        ],
    }
    user_pass = _inductor_option(config, "post_grad_custom_post_pass")
    if observation is not None:
        observation.note_break(getattr(gm, "compile_subgraph_reason", None))
        patches["force_disable_caches"] = True  # a program from the cache would tell nothing
        patches.update(kernel_origins.SETTINGS)
    # What is defined below lives until backward is compiled: it must not hold the inputs.
    parameters = [weakref.ref(x) for x in example_inputs if isinstance(x, torch.nn.Parameter)]
    # One per graph that was compiled within compile_fx, or loaded by AOTAutograd.
    compiled_here: list[wrapper_bypass.Shortcut | None] = []
    loaded: list[wrapper_bypass.Shortcut | None] = []

    def scope() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        # A hit in AOTAutograd's cache skips inner_compile, and with it PyGraph; see `is_warm`.
        off = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
        stack.enter_context(functorch_config.patch(off))
        stack.enter_context(inductor_config.patch(patches))
        # Entered anew in every thread: backward is compiled in autograd's threads.
        stack.enter_context(barriers.in_generated_kernels())
        return stack

    def inner_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        # Before Inductor changes the graph.
        facts = Facts(len(inputs), attachment.random_state_inputs(gm))
        places_itself = attachment.places_its_work_itself(gm)
        kind = attachment.kind_of(kwargs)
        graph_pass = functools.partial(
            GraphPass,
            frozenset(config.own.transforms),
            watch=functools.partial(_note_graph, kind, observation),
            outermost=gm,
        )
        passes = beside(user_pass, graph_pass, comes_first=False)
        noted = len(observation.graphs) if observation else 0
        with scope(), inductor_config.patch(post_grad_custom_post_pass=passes):
            # The box off: no CUDAGraph Trees, and Inductor realigns misaligned inputs itself.
            compiled = compile_fx_inner(gm, inputs, **{**kwargs, "cudagraphs": BoxedBool(False)})
        if places_itself:
            what = "a graph that works on streams or in memory pools of its own"
            runtime.notice_once(f"PyGraph leaves {what} uncaptured")
            compiled_here.append(None)
            return compiled
        if observation is not None:
            compilation.graphs += observation.graphs[noted:]
            with runtime.harmless("noting where kernels come from"):
                observation.note_origins(kernel_origins.origins_of(compiled))
        if is_warm:
            warm_start.keep(getattr(compiled, "_fx_graph_cache_key", None), facts)
        metadata = attachment.current_metadata()
        shortcut = attachment.attach(compiled, config.own, compilation, facts, kwargs, metadata)
        compiled_here.append(shortcut)
        if kind == "forward":
            _note_training(parameters, config)
        return compiled

    def load(compiled: Any, facts: Facts, metadata: Any) -> None:
        kwargs = compiled.fx_kwargs
        shortcut = attachment.attach(
            compiled, config.own, compilation, facts, kwargs, metadata, is_loaded=True
        )
        loaded.append(shortcut)
        if attachment.kind_of(kwargs) == "forward":
            _note_training(parameters, config)

    argument_count = len(example_inputs)
    has_keys = is_warm and _provides(config, "stored_keys")
    with scope() as stack:
        if is_warm:
            # The key of AOTAutograd's cache contains Inductor's settings, and with them everything that
            # PyGraph's part of the compilation depends on: the cuts, and those of `_cache_key`. What it
            # lacks: :mod:`pygraph.compile.warm_programs`.
            stack.enter_context(functorch_config.patch(enable_autograd_cache=True))
            stack.enter_context(warm_start.attaching(load))
        function = compile_fx(gm, example_inputs, inner_compile=inner_compile)
    if has_keys:
        stored_keys.keep()
    found = compiled_here or loaded  # what was loaded is not used where something failed afterwards
    if len(found) == 1 and found[0] is not None and found[0].input_count == argument_count:
        return found[0].around(function)
    return function  # type: ignore[no-any-return]


def _note_training(
    parameters: Sequence[weakref.ref[torch.nn.Parameter]], config: BackendConfig
) -> None:
    """Lets what trains the program's parameters in a plain loop have graphs, if it asks for them."""
    if config.own.optimizers == "off":
        return  # in most programs: nothing of graphed callables is loaded
    from pygraph.callables import trained

    if trained.is_wanted(config.own):
        provided = [_provides(config, name) for name in ("optimizer_steps", "gradient_clips")]
        if any(provided):
            living = (reference() for reference in parameters)
            trained.note_program((p for p in living if p is not None), config.own)


def _provides(config: BackendConfig, name: str) -> bool:
    """Whether a patch on demand is asked for, and in place."""
    return name in config.own.patches and not torch_patches.provide(name)


def _may_be_warm(gm: torch.fx.GraphModule, inputs: Sequence[Any], config: BackendConfig) -> bool:
    """Whether AOTAutograd may load the program from its cache, or keep it there."""
    if not config.own.warm_start or not warm_start.is_wanted_by_user():
        return False
    reason = warm_programs.why_not(gm, inputs)
    if reason:
        runtime.log.info("compiled in every process: %s", reason)
    return not reason and _provides(config, "warm_start")


def _note_graph(
    kind: Kind, observation: Observation | None, graph: torch.fx.Graph, applied: list[Applied]
) -> None:
    """Notes the graph for a report or a summary, if one is being made."""
    if observation is not None:
        observation.note_graph(kind, graph, applied)
    if observations.tally is not None:
        with runtime.harmless("counting operations"):
            observations.tally.note_graph(graph)


def _inductor_option(config: BackendConfig, name: str) -> Any:
    """The value of Inductor's option: of this compilation, or of the process."""
    return config.inductor.get(name, getattr(torch._inductor.config, name))


backend = Backend()
polyfills.register()  # for programs whose first graph calls such a function
torch_patches.install()  # before torch.compile wraps the first program
