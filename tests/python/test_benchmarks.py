"""The workloads: every one runs on a fake GPU, in its mode, with the sizes that its table says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import pygraph
from benchmarks import device_memory, measure, memory_map, run, variants
from benchmarks.paper import PAPER
from benchmarks.rows import longest_first, parts
from benchmarks.small_models import SMALL
from benchmarks.workloads import WORKLOADS, Workload
from pygraph.report.fake_gpu import on_fake_gpu

# A data-dependent program: only a GPU can run it.
_NEEDS_DATA = {"VM", "mask_rcnn", "graph_network"}


@pytest.mark.parametrize("workload", [*PAPER, *WORKLOADS, *SMALL], ids=lambda workload: workload.key)
def test_a_workload_runs_on_a_fake_gpu(workload: Workload) -> None:
    if workload.name == "graph_network":
        pytest.importorskip("torch_geometric")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            module = workload.build()
    except DataDependentOutputException:  # timm computes drop rates with tensors
        module = workload.build()
    module = on_fake_gpu(module, mode).train(workload.mode == "training")
    with mode, torch.no_grad():
        args, kwargs = workload.make_inputs(workload.batch)
        assert all(t.is_cuda for t in [*args, *kwargs.values()])
        if workload.name in _NEEDS_DATA:
            return
        result = module(*args, **kwargs)
    if workload.mode == "training":
        assert result.dim() == 0, "a training step ends in one number"


def test_no_two_workloads_have_the_same_key() -> None:
    workloads = [*PAPER, *WORKLOADS, *SMALL]
    assert len({workload.key for workload in workloads}) == len(workloads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that the CPU is the GPU")
def test_all_variants_are_measured_and_one_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(*args: object) -> None:
        pass

    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    monkeypatch.setattr(torch.cuda, "empty_cache", nothing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", nothing)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", nothing)
    monkeypatch.setattr(measure, "_BLOCK_SECONDS", 0.001)

    def profile(call: Callable[[], object]) -> list[object]:
        call()
        return []

    monkeypatch.setattr(measure, "trace_call", profile)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu().sum()

    workload = Workload("loss", "training", 4, Loss, lambda batch: ((torch.randn(batch, 8),), {}))
    names = (*variants.VARIANTS, *variants.ABLATION)
    limit = torch._dynamo.config.recompile_limit
    try:
        rows = measure.measure(workload, names)
    finally:
        torch._dynamo.config.recompile_limit = limit
    assert [row.backend for row in rows] == [name for name in names if name != "hand-made graph"]
    assert variants.names_for(workload, names)[-1] == "hand-made graph"
    assert all(row.us > 0 and row.rel_err == 0 for row in rows)
    assert "hand-made graph failed" in capsys.readouterr().out


def test_a_workload_with_polyfills_has_a_row_without_them() -> None:
    (workload,) = (w for w in PAPER if w.name == "VM")
    names = variants.names_for(workload, variants.VARIANTS)
    assert names == ["eager", "inductor+graphs", "inductor", "pygraph", "pygraph, no polyfills"]
    assert variants.names_for(workload, ["inductor"]) == ["inductor"]


class _Device:
    """A device and PyTorch's allocator on it; all in MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_use, self.reserved, self.allocated, self.kept = 100, 80, 60, 20
        self.most_reserved, self.most_allocated = 80, 60
        for name, of in (
            ("memory_reserved", lambda: self.reserved),
            ("max_memory_reserved", lambda: self.most_reserved),
            ("memory_allocated", lambda: self.allocated),
            ("max_memory_allocated", lambda: self.most_allocated),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda of=of: of() << 20)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - self.in_use << 20, 1000 << 20))
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self._segments)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)

    def _segments(self) -> list[dict[str, object]]:
        mine = {
            "total_size": 30 + self.kept << 20,
            "allocated_size": 30 << 20,
            "segment_pool_id": (0, 0),
        }
        graphs = {"total_size": 50 << 20, "allocated_size": 0, "segment_pool_id": (0, 1)}
        return [mine, graphs]


def test_what_an_earlier_variant_left_in_the_allocator_is_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Device(monkeypatch)
    assert device_memory.device_mib() == 100
    assert device_memory.in_use_mib() == 80


@pytest.mark.parametrize(
    ("new", "most_allocated", "used"),
    [
        (40, 95, 40),  # 35 for tensors, all in new segments: what was left over could not be used
        (40, 110, 50),  # 50 for tensors: 10 of them must be where memory was left over
        (0, 75, 15),
        (0, 60, 0),
    ],
)
def test_memory_that_was_left_over_counts_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, new: int, most_allocated: int, used: int
) -> None:
    device = _Device(monkeypatch)
    before = device_memory.mark()
    device.in_use += new
    device.reserved += new
    device.most_reserved, device.most_allocated = device.reserved, most_allocated
    assert device_memory.used_since(before) == used


def test_memory_of_libraries_counts_and_stand_ins_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    before = device_memory.mark()
    device.in_use += 7  # a library's
    device.most_reserved += 200  # stand-ins of a recording
    device.most_allocated += 200
    assert device_memory.used_since(before) == 7


def test_a_peak_that_has_passed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    looked = threading.Event()

    def process_mib() -> float:
        if device.in_use > 100:
            looked.set()
        return device.in_use

    monkeypatch.setattr(device_memory, "process_mib", process_mib)
    before = device_memory.mark()
    with device_memory.Peak() as peak:
        device.in_use += 50
        assert looked.wait(10)
        device.in_use -= 40
    assert device_memory.used_since(before, peak) == 50
    assert device_memory.used_since(before) == 10


def test_workloads_wait_for_each_other_in_parts_of_equal_memory() -> None:
    sizes = {"XLNET-T": 18000, "DR-I": 20000, "BSCG": 13000, "EOS": 300, "TKE": 600}
    due = [workload for workload in PAPER if workload.name in sizes]
    rows = [
        {"workload": w.name, "mode": w.mode, "peak_mib": sizes[w.name]} for w in due if w.name != "EOS"
    ]
    names = [[w.name for w in part] for part in parts(due, {"rows": rows}, 3)]
    assert names == [["DR-I", "BSCG", "EOS"], ["XLNET-T", "TKE"]]
    assert parts([], {"rows": rows}, 3) == []
    assert len(parts(PAPER, {"rows": []}, 25)) == 1


def test_a_memory_map_says_who_keeps_a_segment() -> None:
    def frame(filename: str) -> dict[str, object]:
        return {"filename": filename, "line": 7, "name": "f"}

    kept = {
        "size": 3 << 20,
        "state": "active_allocated",
        "frames": [frame("/site/torch/functional.py"), frame("/home/model.py")],
    }
    free = {"size": 97 << 20, "state": "inactive"}
    own = {"total_size": 100 << 20, "allocated_size": 3 << 20, "segment_pool_id": (0, 0)}
    small = {"total_size": 1 << 19, "allocated_size": 0, "segment_pool_id": (0, 0), "blocks": []}
    graphs = {"total_size": 2 << 20, "allocated_size": 0, "segment_pool_id": (0, 1), "blocks": []}
    assert memory_map.describe([small, graphs, own | {"blocks": [kept, free]}]).splitlines() == [
        "segment of 100 MiB, 3.0 in use",
        "         3.000 MiB  /home/model.py:7 in f",
        "segment of 2 MiB, 0.0 in use, of a pool",
    ]


def test_the_longest_workloads_start_first() -> None:
    due = [workload for workload in PAPER if workload.name in ("EOS", "ST", "TKE")]
    document = {
        "rows": [
            {"workload": name, "mode": "inference", "compile_s": seconds}
            for name, seconds in (("EOS", 2.0), ("EOS", None), ("ST", 3.0), ("ST", 4.0))
        ]
    }
    assert [w.name for w in longest_first(due, document)] == ["TKE", "ST", "EOS"]


def test_an_unknown_workload_is_named_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="XLNET-I/inference"):
        run.choose("paper", ["no such"])
    assert [w.name for w in run.choose("paper", ["EOS", "DR-"])] == ["EOS", "DR-I", "DR-T"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="explain measures on this machine")
@pytest.mark.parametrize("name", ["EOS", "TKE", "DLRM", "ALNET", "STCLM"])
def test_small_workloads_fit_in_one_graph(name: str) -> None:
    (workload,) = [w for w in PAPER if w.name == name]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        module = workload.build()
        args, kwargs = workload.make_inputs(workload.batch)
    report = pygraph.explain(module, *args, **kwargs)
    assert report.shares[0].fraction == 1.0
    assert len(report.graphs) == 1
