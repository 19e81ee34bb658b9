"""The sources of PyTorch that the patches were compared with, as digests.

By dotted name, then by the first release with that source (:func:`pygraph.source_digest.digest_of`).
An empty digest stands for what has no source, such as a value, and has to exist; "gone" for what a
release does not have. ``python -m pygraph.torch_patches.check --digests`` prints those of another
release.
"""

from __future__ import annotations

from collections.abc import Mapping

GONE = "gone"

_LOADED = "torch._functorch._aot_autograd.aot_autograd_result"

DIGESTS: Mapping[str, Mapping[str, str]] = {
    "torch._C._dynamo.eval_frame.set_eval_frame_isolate_recompiles_id": {"2.11": GONE, "2.13": ""},
    "torch._C._dynamo.eval_frame.set_eval_frame_override": {"2.11": "", "2.12": GONE},
    "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth": {"2.11": ""},
    "torch._as_tensor_fullprec": {"2.11": "302814543ca273db"},
    "torch._dynamo.bytecode_transformation.create_call_function": {"2.11": "60b2c96ff5218e51"},
    "torch._dynamo.codegen.PyCodegen.make_call_generated_code": {
        "2.11": "a3d7194773318409",
        "2.13": "53baaa8c7dfe8beb",
        "2.14": "986dc6ef6e72a63f",
        "2.15": "39d8db852ffad8f7",
    },
    "torch._dynamo.eval_frame.DisableContext.__call__": {
        "2.11": "e8580642c0bc4b62",
        "2.13": "5cfa9b0218508148",
        "2.14": "9f748f4d16720f00",
    },
    "torch._dynamo.eval_frame.OptimizeContext.__call__": {
        "2.11": "89d779820351fa46",
        "2.12": "95334b5d3eb9c5f1",
        "2.13": "b10c319ab6d35987",
    },
    "torch._dynamo.eval_frame.OptimizeContext.__init__": {
        "2.11": "805fa884cc85e20a",
        "2.13": "a73263df287ecd4e",
        "2.14": "4f9ce8de62d4e6a3",
    },
    "torch._dynamo.eval_frame.OptimizedModule.__call__": {"2.11": "58b4f948ed5a6a80"},
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__": {
        "2.11": "89d779820351fa46",
        "2.12": "95334b5d3eb9c5f1",
        "2.13": "af6e5772f2f1c8c0",
        "2.14": "6aa8d9d4b51f529e",
        "2.15": "bac70570ab1074b2",
    },
    "torch._dynamo.eval_frame._TorchDynamoContext.__init__": {
        "2.11": "6e42d6d144851ad6",
        "2.13": "1562e1dfd265b3aa",
        "2.14": "2b295f0c31c87268",
    },
    "torch._dynamo.eval_frame._callback_from_stance": {
        "2.11": "2b90b8dc6a74b86f",
        "2.13": "9702fa6e392570d2",
    },
    "torch._dynamo.eval_frame._force_eager_nested_compile": {"2.11": GONE, "2.14": ""},
    "torch._dynamo.eval_frame._get_eval_frame_override": {"2.11": "0eb8c9a468bdded3", "2.12": GONE},
    "torch._dynamo.eval_frame._in_optimized_module": {"2.11": ""},
    "torch._dynamo.eval_frame._is_eager_on_nested_compile": {"2.11": GONE, "2.14": "60f0d3caa5bbdd4b"},
    "torch._dynamo.eval_frame._is_skip_guard_eval_unsafe_stance": {"2.11": "a781217a532dd5d5"},
    "torch._dynamo.eval_frame._set_in_optimized_module": {"2.11": "f68b4735a157a0f2"},
    "torch._dynamo.eval_frame._stance": {"2.11": ""},
    "torch._dynamo.eval_frame.innermost_backend": {
        "2.11": "5aa404f9bafe9d14",
        "2.13": "e21d95a7ae34af06",
    },
    "torch._dynamo.guards.GuardBuilder.AUTOGRAD_SAVED_TENSORS_HOOKS": {
        "2.11": "849fbdb0bf4f5df5",
        "2.12": "8f48c3bd7fda3fed",
    },
    "torch._dynamo.guards.GuardBuilder.CLOSURE_MATCH": {"2.11": "6d6ff0f6405ff5ea"},
    "torch._dynamo.guards.GuardBuilder.CONSTANT_MATCH": {"2.11": "72c3a61c993791f6"},
    "torch._dynamo.guards.GuardBuilder.HASATTR": {
        "2.11": "5d234e57dac72f74",
        "2.12": "81aeda546d9fcfcc",
        "2.13": "108e85784353cc75",
        "2.14": "f29d765f85edcc42",
    },
    "torch._dynamo.guards.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT": {
        "2.11": "1cd7053ed9ee40e2",
        "2.12": "29ea89de56dddf29",
        "2.13": "d2421402e6d47d96",
        "2.14": "08a4bd622209b4e5",
    },
    "torch._dynamo.guards.GuardBuilder.TYPE_MATCH": {
        "2.11": "60f1c7354c10181d",
        "2.12": "938e6d6d45e03ec3",
        "2.13": "853ab4dbac8a20d4",
        "2.15": "ecb11478cb792575",
    },
    "torch._dynamo.guards.GuardBuilder._set_guard_export_info": {
        "2.11": "98b31a7050a8f274",
        "2.13": "52d34a79bd042e5c",
    },
    "torch._dynamo.guards._get_closure_vars": {
        "2.11": "84a8202cdd667a07",
        "2.12": "a3c81cbdf039aca4",
        "2.14": "88bf8219391d8148",
        "2.15": "e5029bd869b059ec",
    },
    "torch._dynamo.guards.from_numpy": {"2.11": "e746f92929b20283"},
    "torch._dynamo.mutation_guard.install_generation_tagging_init": {
        "2.11": "3bdc21fd7c531d1a",
        "2.15": "3f2b61959e88d77d",
    },
    "torch._dynamo.output_graph.OutputGraph.install_global_by_id": {"2.11": "f54d0beab821dd60"},
    "torch._dynamo.output_graph.OutputGraph.install_global_unsafe": {
        "2.11": "9ac55d0a6a29493e",
        "2.13": "8d9a2b5c4a4fafbc",
    },
    "torch._dynamo.source.AttrSource.reconstruct": {"2.11": "a44085de29e2dfe9"},
    "torch._dynamo.source.DictGetItemSource.reconstruct": {"2.11": "99f1eebf655df4bf"},
    "torch._dynamo.source.NNModuleSource.reconstruct": {"2.11": "08939775abeb421d"},
    "torch._dynamo.source.NumpyTensorSource.reconstruct": {"2.11": "aa2894a90ae99957"},
    "torch._dynamo.source.TypeSource": {"2.11": "698871be50738a1c"},
    "torch._dynamo.utils.record_pregraph_bytecode_enter": {"2.11": "86027fdd37458db0"},
    "torch._dynamo.utils.record_pregraph_bytecode_exit": {"2.11": "c7d4f6e45bdbd78f"},
    f"{_LOADED}.CompiledBackward": {"2.11": "f0a8cf678c218e71", "2.12": "be6fc190ea109e21"},
    f"{_LOADED}.CompiledForward": {"2.11": "092bbd2e3b9183c4"},
    f"{_LOADED}.FxGraphCacheLoadable": {"2.11": "ffd54af416767937", "2.12": "9bf7329178aae115"},
    f"{_LOADED}.GenericAOTAutogradResult._load_and_post_compile": {
        "2.11": GONE,
        "2.12": "e83c03734436ebbc",
    },
    f"{_LOADED}.GenericAOTAutogradResult.wrap_post_compile": {
        "2.11": "70d011bd7ec10d3d",
        "2.12": "e870a5745b9a5ab2",
        "2.13": "016d87bc8fa4011f",
        "2.15": "240a79ae9b205f97",
    },
    f"{_LOADED}.GenericCompiledBackward": {"2.11": "99bfe9b4edaab87d", "2.12": "301a912f6c3f0dd4"},
    "torch._functorch._aot_autograd.utils.saved_tensors_hooks_are_inlineable": {
        "2.11": "a73cff7ad350e29e"
    },
    "torch._functorch._aot_autograd.utils.top_saved_tensors_hooks": {"2.11": "28019853f7efb205"},
    "torch._functorch.utils.unwrap_dead_wrappers": {"2.11": "0524337bd028d648"},
    "torch._guards.Guard.create": {"2.11": "bf4bf0c33a7e0330"},
    "torch._guards.TracingContext.try_get": {"2.11": "c99ab9f68e82ac22"},
    "torch._inductor.codecache.build_code_hash": {"2.15": "5357a3b0a64aa230"},
    "torch._inductor.codecache.torch_key": {"2.15": "3222600b55d1ea72"},
    "torch._inductor.codegen.common.InplacedBuffer": {"2.11": "e62081eb796e256e"},
    "torch._inductor.codegen.common.KernelArgs.make_inplace": {
        "2.11": "6c052f5d58f69d6c",
        "2.14": "da29bacea9566bdf",
    },
    "torch._inductor.codegen.triton.TritonKernel.codegen_body": {
        "2.11": "7b8c754eafd0e5c9",
        "2.12": "1ae297687f091fef",
        "2.14": "62e4ac3a163bb497",
        "2.15": "5d7274663ece8aa7",
    },
    "torch._inductor.codegen.triton.TritonKernel.load": {
        "2.11": "2847485701fa1a03",
        "2.12": "0ef1856fdf2204dd",
        "2.13": "524883313d3e6599",
        "2.14": "28416e369a586a6e",
        "2.15": "86a8144c35b540dd",
    },
    "torch._inductor.codegen.triton.TritonKernel.store": {
        "2.11": "e804ae6ff7060723",
        "2.13": "fc17494a23848c35",
        "2.14": "aeb652eaaeb3fe6d",
        "2.15": "a17f03adbfa3e67f",
    },
    "torch._inductor.codegen.triton.TritonKernel.store_reduction": {
        "2.11": "918c373bfd0958ca",
        "2.14": "1dc25f9e263c2c75",
        "2.15": "1d6970f823373d28",
    },
    "torch._inductor.runtime.triton_compat.triton_key": {"2.15": "d4f41eb8366e93d1"},
    "torch._inductor.utils.DeferredLineBase": {"2.11": "61623196002046bc"},
    "torch.autograd.profiler._disable_profiler": {"2.11": ""},
    "torch.autograd.profiler._enable_profiler": {"2.11": ""},
    "torch.autograd.profiler._prepare_profiler": {"2.11": ""},
    "torch.compiler._is_exporting_flag": {"2.11": ""},
    "torch.compiler.is_exporting": {"2.11": "acf9000408700772"},
    "torch.nn.utils.clip_grad._clip_grads_with_norm_": {"2.11": "ddb14ed69ad1685f"},
    "torch.nn.utils.clip_grad._get_total_norm": {"2.11": "2db238c8fa9d432d"},
    "torch.nn.utils.clip_grad._no_grad": {"2.11": "3176f25d7fc4d2b4"},
    "torch.nn.utils.clip_grad.clip_grad_norm_": {"2.11": "ec16b7d5a2b61aa5"},
    "torch.optim.Optimizer._optimizer_step_code": {"2.11": "4658e326414fc854"},
    "torch.fx._symbolic_trace._get_is_fx_tracing": {"2.11": GONE, "2.14": "73073ce223302a5d"},
    "torch.fx._symbolic_trace._is_fx_tracing_flag": {"2.11": "", "2.14": GONE},
    "torch.fx._symbolic_trace._is_fx_tracing_tls": {"2.11": GONE, "2.14": ""},
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing": {
        "2.11": "fe8ed1ca236cd02b",
        "2.14": "5a421aa96d66773c",
    },
    "torch.nn.Module._call_impl": {"2.11": "a516c7f2862db22f", "2.15": "d6b9f2d702e9c316"},
    "torch.nn.Module._wrapped_call_impl": {"2.11": "b8224c6ae2fb1a82"},
    "torch.nn.modules.module._has_any_global_hook": {"2.11": "b0cf13b75b317cb4"},
}
