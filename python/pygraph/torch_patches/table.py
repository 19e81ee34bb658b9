"""The patches: every part of PyTorch that PyGraph replaces, and the versions that each is known to fit.

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
_WRITES_CODE = "torch._dynamo.codegen.PyCodegen.make_call_generated_code"
_OURS = "pygraph.torch_patches"


@dataclasses.dataclass(frozen=True)
class Patch:
    """A part of PyTorch that PyGraph replaces.

    name: as in the option ``pygraph.patches`` and in ``pygraph.status()``.
    replaces: dotted names, which are resolved only when the patch is applied or checked.
    relies_on: dotted names of what it reads, or does in the place of what it replaces.
    known: the releases that it fits. For each, a digest of every name's source, in the order of
        `names` (:func:`pygraph.source_digest.digest_of`); an empty one for what has no source, such as
        a value, which has to exist.
    exact: whether every program has the same result with it. If not, docs/footguns.md says which do
    not. scope: "process" for what is replaced once for all programs, by an equal one; "compilation"
        for what belongs to one program and goes with it.
    saves: microseconds of the host per call, or a comparison, and where that is measured.
    apply: the function that applies it, "module:name". For a process it takes nothing; for a
        compilation the graph, Dynamo's OutputGraph and an Attempt.
    """

    name: str
    replaces: tuple[str, ...]
    relies_on: tuple[str, ...]
    known: Mapping[str, tuple[str, ...]]
    exact: bool
    scope: Literal["process", "compilation"]
    saves: str
    apply: str

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
        known={
            "2.11": (
                "a44085de29e2dfe9",
                "99f1eebf655df4bf",
                "a3d7194773318409",
                "08939775abeb421d",
                "f54d0beab821dd60",
                "60b2c96ff5218e51",
            )
        },
        exact=True,
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
        known={
            "2.11": (
                "6d6ff0f6405ff5ea",
                "72c3a61c993791f6",
                "bf4bf0c33a7e0330",
                "60f1c7354c10181d",
                "698871be50738a1c",
                "f54d0beab821dd60",
            )
        },
        exact=False,
        scope="compilation",
        saves="73 of 160 us for MobileBERT, 21 to 31 of 113 for BERT (docs/results/host-time.md)",
        apply=f"{_OURS}.class_guard:apply",
    ),
    Patch(
        name="method_guard",
        replaces=(f"{_GUARDS}.HASATTR",),
        relies_on=("torch._guards.Guard.create", f"{_GUARDS}.TYPE_MATCH"),
        known={"2.11": ("5d234e57dac72f74", "bf4bf0c33a7e0330", "60f1c7354c10181d")},
        exact=False,
        scope="compilation",
        saves="151 of 155 us for 200 pairs of layers in a Sequential (docs/results/host-time.md)",
        apply=f"{_OURS}.method_guard:apply",
    ),
    Patch(
        name="number_guards",
        replaces=(f"{_DYNAMO}.guards.from_numpy",),
        relies_on=(f"{_DYNAMO}.guards._get_closure_vars",),
        known={"2.11": ("e746f92929b20283", "84a8202cdd667a07")},
        exact=True,
        scope="process",
        saves="with number_arguments 150 of 208 us for 18 NumPy numbers (docs/results/host-time.md)",
        apply=f"{_OURS}.numbers:apply_to_guards",
    ),
    Patch(
        name="number_arguments",
        replaces=("torch._as_tensor_fullprec", f"{_SOURCE}.NumpyTensorSource.reconstruct"),
        relies_on=(_WRITES_CODE, f"{_DYNAMO}.bytecode_transformation.create_call_function"),
        known={
            "2.11": ("302814543ca273db", "aa2894a90ae99957", "a3d7194773318409", "60b2c96ff5218e51")
        },
        exact=True,
        scope="compilation",
        saves="not measured apart from number_guards",
        apply=f"{_OURS}.numbers:apply_to_arguments",
    ),
    Patch(
        name="dead_wrappers",
        replaces=("torch._functorch.utils.unwrap_dead_wrappers",),
        relies_on=(),
        known={"2.11": ("0524337bd028d648",)},
        exact=True,
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
        known={
            "2.11": ("5d234e57dac72f74", "bf4bf0c33a7e0330", "60f1c7354c10181d", "1cd7053ed9ee40e2")
        },
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
            f"{_FRAME}.OptimizeContext.__init__",
            f"{_FRAME}._callback_from_stance",
            f"{_FRAME}._is_skip_guard_eval_unsafe_stance",
            f"{_FRAME}._get_eval_frame_override",
            f"{_FRAME}._set_in_optimized_module",
            f"{_FRAME}.innermost_backend",
            f"{_FRAME}._stance",
            f"{_DYNAMO}.mutation_guard.install_generation_tagging_init",
            "torch._guards.TracingContext.try_get",
            "torch.compiler.is_exporting",
            "torch.compiler._is_exporting_flag",
            "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
            "torch.fx._symbolic_trace._is_fx_tracing_flag",
            "torch.nn.Module._wrapped_call_impl",
            "torch.nn.Module._call_impl",
            "torch.nn.modules.module._has_any_global_hook",
            "torch._C._dynamo.eval_frame.set_eval_frame_override",
            "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth",
        ),
        known={
            "2.11": (
                "89d779820351fa46",
                "58b4f948ed5a6a80",
                "6e42d6d144851ad6",
                "805fa884cc85e20a",
                "2b90b8dc6a74b86f",
                "a781217a532dd5d5",
                "0eb8c9a468bdded3",
                "f68b4735a157a0f2",
                "5aa404f9bafe9d14",
                "",
                "3bdc21fd7c531d1a",
                "c99ab9f68e82ac22",
                "acf9000408700772",
                "",
                "fe8ed1ca236cd02b",
                "",
                "b8224c6ae2fb1a82",
                "a516c7f2862db22f",
                "b0cf13b75b317cb4",
                "",
                "",
            )
        },
        exact=True,
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
        known={"2.11": ("86027fdd37458db0", "c7d4f6e45bdbd78f", "a3d7194773318409")},
        exact=True,
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
        known={
            "2.11": (
                "849fbdb0bf4f5df5",
                "bf4bf0c33a7e0330",
                "28019853f7efb205",
                "a73cff7ad350e29e",
                "98b31a7050a8f274",
            )
        },
        exact=True,
        scope="compilation",
        saves="1 us (docs/results/host-time.md)",
        apply=f"{_OURS}.saved_hooks_guard:apply",
    ),
    Patch(
        name="module_flag",
        replaces=(f"{_FRAME}._set_in_optimized_module",),
        relies_on=(f"{_FRAME}._in_optimized_module",),
        known={"2.11": ("f68b4735a157a0f2", "")},
        exact=True,
        scope="process",
        saves="0.7 us for a module that compiled_call leaves to PyTorch (docs/results/host-time.md)",
        apply=f"{_OURS}.module_flag:apply",
    ),
    Patch(
        name="untraced_call",
        replaces=(f"{_DYNAMO}.output_graph.OutputGraph.install_global_unsafe",),
        relies_on=(f"{_DYNAMO}.eval_frame.DisableContext.__call__",),
        known={"2.11": ("9ac55d0a6a29493e", "e8580642c0bc4b62")},
        exact=True,
        scope="compilation",
        saves="0.6 us (docs/results/host-time.md)",
        apply=f"{_OURS}.untraced_call:apply",
    ),
)
