"""The patches: every part of PyTorch that PyGraph replaces, and the releases that each is known to fit.

Only speed depends on those in ``PATCHES``, which the user can switch off. Those in ``REQUIRED`` cannot
be switched off: results depend on the barriers, without which there are no graphs, and the process's
life in a profile depends on the other.

Data only: nothing here imports PyTorch. docs/how-to/port-to-a-new-pytorch.md says how to add a release.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

_DYNAMO = "torch._dynamo"
_FRAME = "torch._dynamo.eval_frame"
_GUARDS = "torch._dynamo.guards.GuardBuilder"
_SOURCE = "torch._dynamo.source"
_LOADED = "torch._functorch._aot_autograd.aot_autograd_result"
_TRITON = "torch._inductor.codegen.triton.TritonKernel"
_COMMON = "torch._inductor.codegen.common"
_WRITES_CODE = "torch._dynamo.codegen.PyCodegen.make_call_generated_code"
_PROFILER = "torch.autograd.profiler"
_CLIP = "torch.nn.utils.clip_grad"
_OURS = "pygraph.torch_patches"

RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")  # that PyGraph supports, the oldest first

_TAGS_ARE_OFF = (
    "PyTorch no longer checks trees of modules at once (docs/decisions/0027-dictionary-tags.md)"
)


@dataclasses.dataclass(frozen=True)
class Patch:
    """A part of PyTorch that PyGraph replaces.

    name: as in the option ``pygraph.patches`` and in ``pygraph.status()``.
    replaces: dotted names of the replaced functions. They are resolved only when the patch is applied
        or checked.
    relies_on: dotted names of functions and values that the patch reads or reimplements.
    releases: releases that the patch fits, if the names have the digests of :mod:`.digests`.
    exact: whether every program has the same result with it. If not, docs/footguns.md has the
        exceptions.
    scope: "process": replaced once, for all programs, by an equal function. "on demand": the same, when
        a part of PyGraph first needs it. "compilation": changes objects of one program, and disappears
        with them.
    saves: host time per call in microseconds, or a comparison, and the page with the measurement.
    apply: the function that applies it, "module:name". For a compilation it takes the graph, Dynamo's
        OutputGraph and an Attempt; else nothing.
    left_off: releases on which the patch would gain nothing, and why.
    """

    name: str
    replaces: tuple[str, ...]
    scope: Literal["process", "on demand", "compilation"]
    saves: str
    apply: str
    relies_on: tuple[str, ...] = ()
    releases: tuple[str, ...] = RELEASES
    exact: bool = True
    left_off: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All parts of PyTorch that the patch depends on."""
        return (*self.replaces, *self.relies_on)


# In the order of what they save. A compilation's are applied in this order.
PATCHES: tuple[Patch, ...] = (
    Patch(
        name="parameter_loader",
        replaces=(f"{_SOURCE}.AttrSource.reconstruct", f"{_SOURCE}.DictGetItemSource.reconstruct"),
        relies_on=(
            _WRITES_CODE,
            f"{_SOURCE}.NNModuleSource.reconstruct",
            f"{_DYNAMO}.output_graph.OutputGraph.install_global_by_id",
            f"{_DYNAMO}.bytecode_transformation.create_call_function",
        ),
        scope="compilation",
        saves="280 of 440 us with 1117 parameters, 20 of 35 with 142 (docs/results/host-time.md)",
        apply=f"{_OURS}.parameters:apply",
    ),
    Patch(
        name="class_guard",
        replaces=(f"{_GUARDS}.CLOSURE_MATCH", f"{_GUARDS}.CONSTANT_MATCH"),
        relies_on=(
            "torch._guards.Guard.create",
            f"{_GUARDS}.TYPE_MATCH",
            f"{_SOURCE}.TypeSource",
            f"{_DYNAMO}.output_graph.OutputGraph.install_global_by_id",
        ),
        releases=RELEASES[:1],
        left_off={release: _TAGS_ARE_OFF for release in RELEASES[1:]},
        exact=False,
        scope="compilation",
        saves="73 of 160 us for MobileBERT, 21 to 31 of 113 for BERT (docs/results/host-time.md)",
        apply=f"{_OURS}.class_guard:apply",
    ),
    Patch(
        name="method_guard",
        replaces=(f"{_GUARDS}.HASATTR",),
        relies_on=("torch._guards.Guard.create", f"{_GUARDS}.TYPE_MATCH"),
        releases=RELEASES[:1],
        left_off={release: _TAGS_ARE_OFF for release in RELEASES[1:]},
        exact=False,
        scope="compilation",
        saves="151 of 155 us for 200 pairs of layers in a Sequential (docs/results/host-time.md)",
        apply=f"{_OURS}.method_guard:apply",
    ),
    Patch(
        name="number_guards",
        replaces=(f"{_DYNAMO}.guards.from_numpy",),
        relies_on=(f"{_DYNAMO}.guards._get_closure_vars",),
        scope="process",
        saves="with number_arguments 150 of 208 us for 18 NumPy numbers (docs/results/host-time.md)",
        apply=f"{_OURS}.numbers:apply_to_guards",
    ),
    Patch(
        name="number_arguments",
        replaces=("torch._as_tensor_fullprec", f"{_SOURCE}.NumpyTensorSource.reconstruct"),
        relies_on=(_WRITES_CODE, f"{_DYNAMO}.bytecode_transformation.create_call_function"),
        scope="compilation",
        saves="not measured apart from number_guards",
        apply=f"{_OURS}.numbers:apply_to_arguments",
    ),
    Patch(
        name="dead_wrappers",
        replaces=("torch._functorch.utils.unwrap_dead_wrappers",),
        releases=RELEASES[:3],
        left_off={release: "PyTorch has it in C++" for release in RELEASES[3:]},
        scope="process",
        saves="110 to 140 us for 206 arguments of a training step (docs/results/host-time.md)",
        apply=f"{_OURS}.dead_wrappers:apply",
    ),
    Patch(
        name="attribute_guard",
        replaces=(f"{_GUARDS}.HASATTR",),
        relies_on=(
            "torch._guards.Guard.create",
            f"{_GUARDS}.TYPE_MATCH",
            f"{_GUARDS}.NOT_PRESENT_IN_GENERIC_DICT",
        ),
        exact=False,
        scope="compilation",
        saves="25 of 72 us for BERT, 26 of 93 for MobileBERT (docs/results/host-time.md)",
        apply=f"{_OURS}.attribute_guard:apply",
    ),
    Patch(
        name="compiled_call",
        replaces=(f"{_FRAME}.OptimizeContext.__call__", f"{_FRAME}.OptimizedModule.__call__"),
        relies_on=(
            f"{_FRAME}._TorchDynamoContext.__init__",
            f"{_FRAME}._TorchDynamoContext.__call__",
            f"{_FRAME}.OptimizeContext.__init__",
            f"{_FRAME}._callback_from_stance",
            f"{_FRAME}._is_skip_guard_eval_unsafe_stance",
            f"{_FRAME}._get_eval_frame_override",
            f"{_FRAME}._set_in_optimized_module",
            f"{_FRAME}.innermost_backend",
            f"{_FRAME}._stance",
            f"{_FRAME}._is_eager_on_nested_compile",
            f"{_FRAME}._force_eager_nested_compile",
            f"{_DYNAMO}.mutation_guard.install_generation_tagging_init",
            "torch._guards.TracingContext.try_get",
            "torch.compiler.is_exporting",
            "torch.compiler._is_exporting_flag",
            "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
            "torch.fx._symbolic_trace._is_fx_tracing_flag",
            "torch.fx._symbolic_trace._is_fx_tracing_tls",
            "torch.fx._symbolic_trace._get_is_fx_tracing",
            "torch.nn.Module._wrapped_call_impl",
            "torch.nn.Module._call_impl",
            "torch.nn.modules.module._has_any_global_hook",
            "torch._C._dynamo.eval_frame.set_eval_frame_override",
            "torch._C._dynamo.eval_frame.set_eval_frame_isolate_recompiles_id",
            "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth",
        ),
        scope="process",
        saves="with pregraph_range, module_flag and untraced_call 8 of 15 us for a function, 17 of 27 "
        "for a small module (docs/results/host-time.md)",
        apply=f"{_OURS}.compiled_call:apply",
    ),
    Patch(
        name="pregraph_range",
        replaces=(
            f"{_DYNAMO}.utils.record_pregraph_bytecode_enter",
            f"{_DYNAMO}.utils.record_pregraph_bytecode_exit",
        ),
        relies_on=(_WRITES_CODE,),
        releases=RELEASES[:4],
        left_off={release: "PyTorch skips the range without a profiler" for release in RELEASES[4:]},
        scope="process",
        saves="2.0 of 12.3 us for a small module (docs/results/host-time.md)",
        apply=f"{_OURS}.pregraph_range:apply",
    ),
    Patch(
        name="saved_hooks_guard",
        replaces=(f"{_GUARDS}.AUTOGRAD_SAVED_TENSORS_HOOKS",),
        relies_on=(
            "torch._guards.Guard.create",
            "torch._functorch._aot_autograd.utils.top_saved_tensors_hooks",
            "torch._functorch._aot_autograd.utils.saved_tensors_hooks_are_inlineable",
            f"{_GUARDS}._set_guard_export_info",
        ),
        scope="compilation",
        saves="1 us (docs/results/host-time.md)",
        apply=f"{_OURS}.saved_hooks_guard:apply",
    ),
    Patch(
        name="module_flag",
        replaces=(f"{_FRAME}._set_in_optimized_module",),
        relies_on=(f"{_FRAME}._in_optimized_module",),
        scope="process",
        saves="0.7 us for a module that compiled_call leaves to PyTorch (docs/results/host-time.md)",
        apply=f"{_OURS}.module_flag:apply",
    ),
    Patch(
        name="untraced_call",
        replaces=(f"{_DYNAMO}.output_graph.OutputGraph.install_global_unsafe",),
        relies_on=(f"{_DYNAMO}.eval_frame.DisableContext.__call__",),
        scope="compilation",
        saves="0.6 us (docs/results/host-time.md)",
        apply=f"{_OURS}.untraced_call:apply",
    ),
    Patch(
        name="warm_start",
        replaces=(f"{_LOADED}.GenericAOTAutogradResult.wrap_post_compile",),
        relies_on=(
            f"{_LOADED}.GenericAOTAutogradResult._load_and_post_compile",
            f"{_LOADED}.FxGraphCacheLoadable",
            f"{_LOADED}.CompiledForward",
            f"{_LOADED}.CompiledBackward",
            f"{_LOADED}.GenericCompiledBackward",
        ),
        scope="on demand",
        saves="a compilation in each later process, with the option pygraph.warm_start "
        "(docs/explanation/warm-starts.md)",
        apply="pygraph.compile.warm_start:install",
    ),
    Patch(
        name="stored_keys",
        replaces=("torch._inductor.runtime.triton_compat.triton_key",),
        relies_on=("torch._inductor.codecache.torch_key", "torch._inductor.codecache.build_code_hash"),
        releases=RELEASES[4:],
        left_off={release: "PyTorch's keys are not known there" for release in RELEASES[:4]},
        scope="on demand",
        saves="reading PyTorch's and Triton's files in each later process, with the option "
        "pygraph.warm_start (docs/explanation/warm-starts.md)",
        apply=f"{_OURS}.stored_keys:install",
    ),
    Patch(
        name="optimizer_steps",
        replaces=("torch.optim.Optimizer._optimizer_step_code",),
        scope="on demand",
        saves="the host time of optimizer.step() in plain loops, not measured on a GPU yet",
        apply="pygraph.callables.optimizer_steps:install",
    ),
    Patch(
        name="gradient_clips",
        replaces=(f"{_CLIP}.clip_grad_norm_",),
        relies_on=(f"{_CLIP}._no_grad", f"{_CLIP}._get_total_norm", f"{_CLIP}._clip_grads_with_norm_"),
        scope="on demand",
        saves="the host time of clip_grad_norm_ in plain loops, not measured on a GPU yet",
        apply="pygraph.callables.gradient_clips:install",
    ),
)

REQUIRED: tuple[Patch, ...] = (
    Patch(
        name="kernel_barriers",
        replaces=(f"{_TRITON}.codegen_body",),
        relies_on=(
            f"{_TRITON}.load",
            f"{_TRITON}.store",
            f"{_TRITON}.store_reduction",
            f"{_COMMON}.KernelArgs.make_inplace",
            f"{_COMMON}.InplacedBuffer",
            "torch._inductor.utils.DeferredLineBase",
        ),
        scope="on demand",
        saves="nothing: it orders reads and writes in kernels (docs/explanation/inductor-race.md)",
        apply="pygraph.compile.barriers:install",
    ),
    Patch(
        name="profiles",
        replaces=(
            f"{_PROFILER}._prepare_profiler",
            f"{_PROFILER}._enable_profiler",
            f"{_PROFILER}._disable_profiler",
        ),
        scope="process",
        saves="nothing: it keeps CUPTI from ending the process (docs/explanation/profiles.md)",
        apply=f"{_OURS}.profiles:install",
    ),
)
