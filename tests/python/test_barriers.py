"""Barriers in kernels of Inductor's that read memory which they also write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import compile_fx, custom_graph_pass
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.utils import fresh_cache

import pygraph
from pygraph import runtime
from pygraph.compile import barriers
from pygraph.fx_passes import cache_key
from pygraph.torch_patches import sources

from . import graphs_on_the_cpu
from .inductor_kernels import Kernel, compiled_accesses, generate


def relu_backward_and_sum(
    a: torch.Tensor, b: torch.Tensor, saved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrites the product within the loop that sums it."""
    masked = (a @ b) * (saved > 0)
    return masked, masked.sum(0)


def normalize_the_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes its input, of which it has two parameters, in the second loop."""
    x.add_(y)
    return (x - x.mean(1, keepdim=True)) * x.var(1, keepdim=True)


def running_mean(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """All threads that work on a row read the mean; one of them writes it."""
    mean.mul_(0.9).add_(x.mean(1))
    return x - mean.unsqueeze(1)


def sum_and_normalize(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores a result in the first loop and loads it in the second."""
    z = x + y
    return z, (z - z.mean(1, keepdim=True)) * z.var(1, keepdim=True)


def relu_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).relu()


def plain_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


Program = tuple[Callable[..., Any], list[tuple[int, ...]]]
OVERWRITING: list[Program] = [
    (relu_backward_and_sum, [(300, 64), (64, 4096), (300, 4096)]),
    (normalize_the_input, [(300, 40000), (300, 40000)]),
    (running_mean, [(300, 40000), (300,)]),
    (sum_and_normalize, [(300, 40000), (300, 40000)]),
]
# Where Inductor puts the barriers itself, from PyTorch 2.14 on: between a store and a later loop
ORDERED = (sum_and_normalize,) if torch.__version__ >= "2.14" else ()


def _kernel(program: Program, **options: Any) -> Kernel:
    (kernel,) = generate(*program, split_reductions=False, **options)
    return kernel


def _ordered(kernel: Kernel) -> bool:
    """Whether a barrier stands between loads and stores of the same buffer, each way.

    A loop counts as run once: the elements of one iteration are not those of the next.
    """
    since_barrier: dict[str, set[str]] = {"load": set(), "store": set()}
    for kind, buffer in kernel.accesses():
        if kind == "barrier":
            for buffers in since_barrier.values():
                buffers.clear()
        elif buffer in since_barrier["store" if kind == "load" else "load"]:
            return False
        else:
            since_barrier[kind].add(buffer)
    return True


@pytest.mark.parametrize("program", OVERWRITING, ids=lambda program: program[0].__name__)
def test_no_thread_reads_what_another_may_have_overwritten(program: Program) -> None:
    assert _ordered(_kernel(program)) is (program[0] in ORDERED), "by Inductor itself: can ours go?"
    with barriers.in_generated_kernels():
        assert _ordered(_kernel(program))


@pytest.mark.parametrize("program", OVERWRITING[1:], ids=lambda program: program[0].__name__)
def test_without_buffers_in_place_barriers_are_still_lacking(program: Program) -> None:
    """Which is why turning them off is not enough."""
    assert _ordered(_kernel(program, inplace_buffers=False)) is (program[0] in ORDERED)
    with barriers.in_generated_kernels():
        assert _ordered(_kernel(program, inplace_buffers=False))


def _all_stores_wait(accesses: list[str]) -> bool:
    """Whether, before each store, a barrier stands after the last load."""
    waits = True
    for access in accesses:
        if access == "st.global" and not waits:
            return False
        if access != "st.global":
            waits = access == "bar.sync"
    return True


@pytest.mark.parametrize(
    ("blocks", "warps"), [((64, 2), 8), ((64, 8), 2), ((1, 64), 8), ((1, 512), 4), ((4, 128), 4)]
)
def test_triton_keeps_the_barrier(blocks: tuple[int, int], warps: int, tmp_path: Path) -> None:
    size = {"XBLOCK": blocks[0], "R0_BLOCK": blocks[1]}
    alone = compiled_accesses(_kernel(OVERWRITING[0]).source, warps, tmp_path, **size)
    with barriers.in_generated_kernels():
        ours = compiled_accesses(_kernel(OVERWRITING[0]).source, warps, tmp_path, **size)
    assert not _all_stores_wait(alone)
    assert _all_stores_wait(ours)


def test_triton_loads_an_element_twice_where_a_tile_has_fewer_elements_than_threads(
    tmp_path: Path,
) -> None:
    """The cause: one of the loads is of the thread that stores, the other of one that does not."""
    source = _kernel(OVERWRITING[0]).source
    small = compiled_accesses(source, 8, tmp_path, XBLOCK=64, R0_BLOCK=2)
    large = compiled_accesses(source, 2, tmp_path, XBLOCK=64, R0_BLOCK=8)
    assert small.count("ld.global") / small.count("st.global") > 1.9
    assert large.count("ld.global") / large.count("st.global") < 1.9


def test_pointwise_kernels_that_overwrite_wait_too() -> None:
    program: Program = (relu_in_place, [(300, 400), (400, 500)])
    with barriers.in_generated_kernels():
        kernel = _kernel(program)
    assert [kind for kind, _ in kernel.accesses()] == ["load", "barrier", "store"]


def test_kernels_that_overwrite_nothing_have_no_barrier() -> None:
    program: Program = (plain_sum, [(300, 40000)])
    with barriers.in_generated_kernels():
        ours = _kernel(program)
    assert "debug_barrier" not in ours.source
    assert ours.source == _kernel(program).source


def test_blocks_of_threads_do_not_share_rows() -> None:
    """A barrier orders the threads of one block only."""
    with inductor_config.patch({"triton.force_cooperative_reductions": True}):
        assert "rsplit" in _kernel(OVERWRITING[2]).source
        with barriers.in_generated_kernels():
            assert "rsplit" not in _kernel(OVERWRITING[2]).source


def test_other_backends_code_is_left_alone() -> None:
    before = _kernel(OVERWRITING[0]).source
    with barriers.in_generated_kernels():
        assert _kernel(OVERWRITING[0]).source != before
    assert _kernel(OVERWRITING[0]).source == before


@pytest.fixture
def unknown_inductor(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name in Inductor that is not as known; as if no kernel had been generated yet."""
    name = "torch._inductor.codegen.triton.TritonKernel.store"
    digest = sources.digest
    monkeypatch.setattr(
        sources, "digest", lambda n, *more: "another" if n == name else digest(n, *more)
    )
    return name


def test_an_inductor_that_is_not_known_keeps_its_kernels(unknown_inductor: str) -> None:
    before = _kernel(OVERWRITING[0]).source
    with barriers.in_generated_kernels():
        assert _kernel(OVERWRITING[0]).source == before
        assert not barriers.wanted()
    (row,) = (row for row in pygraph.status().patches if row.name == "kernel_barriers")
    assert (row.state, row.reason) == ("unknown source", f"{unknown_inductor} has changed")


def test_there_are_no_graphs_without_barriers(
    unknown_inductor: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = graphs_on_the_cpu.install(monkeypatch)
    torch._dynamo.reset()
    runtime.notice_once.cache_clear()
    x = torch.ones(3, 3)
    with fresh_cache(), torch.no_grad():
        result = torch.compile(lambda x: torch.mm(x, x), backend="pygraph")(x)
    assert torch.equal(result, torch.full((3, 3), 3.0))
    assert graphs.infos == []
    assert f"what they still read: {unknown_inductor} has changed" in caplog.text


def test_they_are_there_without_any_optional_patch(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", "none")
    with barriers.in_generated_kernels():
        assert "debug_barrier" in _kernel(OVERWRITING[0]).source
    active = [row.name for row in pygraph.status().patches if row.state == "active"]
    assert active == ["kernel_barriers"]


def test_forward_and_lazy_backward_are_compiled_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, too, where graphs are off; and code of Inductor's cache is not other backends'."""
    compile_inner = compile_fx.compile_fx_inner
    noted = []

    def note(*args: Any, **kwargs: Any) -> Any:
        key = torch._inductor.config.post_grad_custom_pre_pass.uuid()
        # Worker processes, which tune kernels too, have the key that is valid outside.
        is_tuning_found = AutotuneCache._prepare_key("kernel.py") == tuning
        noted.append((bool(kwargs.get("is_backward")), barriers.wanted(), is_tuning_found, key[0]))
        return compile_inner(*args, **kwargs)

    tuning = AutotuneCache._prepare_key("kernel.py")
    monkeypatch.setattr(compile_fx, "compile_fx_inner", note)
    torch._dynamo.reset()
    x = torch.randn(8, requires_grad=True)
    with fresh_cache():
        torch.compile(lambda x: (x.sin() * x).sum(), backend="pygraph")(x).backward()
    assert noted == [(False, True, True, "pygraph"), (True, True, True, "pygraph")]
    assert not barriers.wanted()


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"), reason="newer releases only"
)
@pytest.mark.parametrize("setting", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
@pytest.mark.parametrize("form", ["none of a list", "list", "inference"])
def test_the_users_passes_run_in_all_forms(setting: str, form: str) -> None:
    seen = []
    if form != "inference" and not cache_key.takes_several():
        pytest.skip("this release takes no lists of passes")

    class Pass(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(True)

        def uuid(self) -> str:
            return "user"

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
            seen.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    passes = {"none of a list": [], "list": [Pass(), Pass()], "inference": Aware()}[form]
    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad(), inductor_config.patch({setting: passes}):
        torch.compile(lambda x: x.sin() + 1, backend="pygraph")(torch.randn(8))
    assert len(seen) == {"none of a list": 0, "list": 2, "inference": 1}[form]
