"""What Inductor generates for an H200, and what Triton makes of it, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

_MULTIPROCESSORS = 132
_DEVICE = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=_MULTIPROCESSORS,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=_MULTIPROCESSORS,
    total_memory=140 << 30,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)
_IMAGINED = {
    "torch.cuda.get_device_properties": lambda *args: _PROPERTIES,
    "torch.cuda.get_device_capability": lambda *args: (9, 0),
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda._lazy_init": lambda: None,
    "torch._subclasses.fake_tensor.init_gpu_context": lambda device: None,
    "torch.utils._triton.triton_hash_with_backend": lambda: "",
    "torch._inductor.scheduler.has_triton": lambda: True,  # remembers its first answer
    "torch._inductor.runtime.hints.DeviceProperties.create": lambda device: _DEVICE,
}


@dataclass(frozen=True)
class Kernel:
    source: str
    buffers: dict[str, str]  # by the parameter that points to it

    def accesses(self) -> list[tuple[str, str]]:
        """("load" or "store", buffer) or ("barrier", ""), in the order of the source."""
        found = []
        for line in self.source.splitlines():
            access = re.search(r"tl\.(load|store|atomic_add)\((\w+)", line)
            if access is not None:
                kind = "load" if access.group(1) == "load" else "store"
                found.append((kind, self.buffers[access.group(2)]))
            elif line.strip() == "tl.debug_barrier()":
                found.append(("barrier", ""))
        return found


def generate(
    function: Callable[..., Any],
    sizes: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[Kernel]:
    """The kernels that Inductor generates for a function of tensors of these sizes.

    options: Inductor's, with "__" for ".".
    """
    functional = torch.func.functionalize(function, remove="mutations_and_views")
    make = lambda: [torch.empty(size, device="cuda", dtype=dtype) for size in sizes]  # noqa: E731
    code = generate_module(functional, make, **options)
    pattern = r"async_compile\.triton\('(\w+)', '''\n(.*?)''', device_str"
    kernels = re.findall(pattern, code, re.DOTALL)
    return [Kernel(source, _buffers(name, source, code)) for name, source in kernels]


def generate_module(
    function: Callable[..., Any], make_arguments: Callable[[], list[torch.Tensor]], **options: Any
) -> str:
    """The whole module that Inductor generates. options: as of ``generate``."""
    patches = {name.replace("__", "."): value for name, value in options.items()}
    with contextlib.ExitStack() as stack:
        for name, stand_in in _IMAGINED.items():
            stack.enter_context(mock.patch(name, stand_in))
        stack.enter_context(inductor_config.patch(force_disable_caches=True, **patches))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            args = make_arguments()
        gm = make_fx(function, decomposition_table=select_decomp_table())(*args)
        lowering = GraphLowering(gm, example_inputs=args)
        with (
            V.set_fake_mode(mode),
            V.set_graph_handler(lowering),
            V.set_debug_handler(mock.MagicMock()),
            torch.no_grad(),
        ):
            lowering.run(*args)
            code: str = lowering.codegen()[0].value
    return code


def _buffers(name: str, source: str, code: str) -> dict[str, str]:
    parameters = re.search(rf"def {name}\((.*?)\):", source)
    call = re.search(rf"{name}\.run\((.*?), stream=", code)
    assert parameters is not None and call is not None
    return dict(zip(parameters.group(1).split(", "), call.group(1).split(", "), strict=False))


def compiled_accesses(source: str, warps: int, folder: Path, **blocks: int) -> list[str]:
    """The kinds of memory accesses and barriers in a kernel's PTX for an H200, in their order.

    blocks: XBLOCK and so on. folder: an empty one for the source.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    path = folder / "kernel.py"
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    noted: dict[str, Any] = {}

    def note(*args: Any, triton_meta: dict[str, Any], **kwargs: Any) -> Callable[[Any], Any]:
        def keep(kernel: Any) -> Any:
            noted.update(kernel=kernel, signature=triton_meta["signature"])
            return kernel

        return keep

    heuristics = mock.patch.multiple(
        "torch._inductor.runtime.triton_heuristics",
        pointwise=note,
        reduction=note,
        persistent_reduction=note,
    )
    with heuristics:
        _load(path)
    kernel = compile_kernel(
        ASTSource(noted["kernel"], noted["signature"], blocks),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    code = re.sub(r"//.*", "", kernel.asm["ptx"])
    return re.findall(r"\b(?:ld\.global|st\.global|bar\.sync)\b", code)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated_kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
