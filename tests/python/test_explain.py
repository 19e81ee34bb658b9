"""The report: what it says of traced programs, its JSON and its page."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import pygraph
from benchmarks import run
from pygraph import cli, operators
from pygraph.observations import Observation, Origin, observing
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry, PartitionInfo, State
from pygraph.report import measure, profile, wording
from pygraph.report.classify import Kind, classify, segments
from pygraph.report.estimate import estimate
from pygraph.report.explanation import KernelRow, Report, Share, variant_timings
from pygraph.report.fake_gpu import trace
from pygraph.report.stats import GraphStats
from pygraph.select.trial import REPLAYED, UNCAPTURED, Timing

from . import graphs_on_the_cpu
from .graphs_on_the_cpu import CpuGraphs

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.table = torch.arange(16)

    def forward(self, x: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.layer(x) / temperature + self.table.to(x.device)
        keep = (h > 0).nonzero()
        return h.softmax(-1), h.mean().cpu(), keep.float().exp()


@pytest.fixture(scope="module")
def report() -> Report:
    return estimate("Model", Model(), (torch.randn(4, 16), torch.tensor(2.0)), {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="explain measures on this machine")
def test_explain_estimates_without_a_gpu(report: Report) -> None:
    assert pygraph.explain(Model(), torch.randn(4, 16), torch.tensor(2.0)) == report


def test_an_estimate_counts_every_operation_once(report: Report) -> None:
    assert report.estimated
    (share,) = report.shares
    assert share.unit == "operations"
    assert 0.5 < share.fraction < 1
    assert sum(row.nodes for row in report.graphs) == share.in_graphs
    assert sum(part.width for part in report.strip) == share.total
    reasons = {cut.where.rsplit("/", 1)[-1]: cut.reason for cut in report.cuts}
    assert any("nonzero" in reason for reason in reasons.values())
    assert all(re.match(r"test_explain\.py:\d+$", where) for where in reasons)
    assert {note.transform for note in report.transformations} == {
        *("cpu_scalars", "cpu_tensors", "cpu_outputs")
    }


def test_the_json_has_the_documented_keys(report: Report) -> None:
    data = json.loads(report.to_json())
    assert data["schema_version"] == 2
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "report.md").read_text("utf-8")
    for key in data:
        assert f"`{key}`" in documented, key
    for table in ("shares", "graphs", "cuts", "transformations", "strip"):
        for key in data[table][0]:
            assert f"`{key}`" in documented, f"{table}: {key}"


def test_a_row_tells_what_the_selection_measured() -> None:
    timings = {
        UNCAPTURED: Timing(5e-3, 1e-3, 5e-3, 0.01, 0),
        REPLAYED: Timing(1e-4, 1e-3, 1e-3, 0.0, 9),
    }
    row = GraphStats("forward", 0, "captured", "", timings=timings, selected=REPLAYED)
    rows = variant_timings(row)
    assert [(row["variant"], row["period_us"], row["selected"]) for row in rows] == [
        (UNCAPTURED, pytest.approx(5000), False),
        (REPLAYED, pytest.approx(1000), True),
    ]
    assert wording.graph_cells(row)[-1] == "replayed 1,000, uncaptured 5,000"


def test_a_row_tells_how_many_kernels_run_at_a_time(report: Report) -> None:
    row = dataclasses.replace(report.graphs[0], nodes=153, lanes=4)
    assert "153 (4 at a time)" in wording.graph_cells(row)
    assert "153" in wording.graph_cells(dataclasses.replace(row, lanes=1))


def test_the_terminal_report_names_lines_and_reasons(report: Report) -> None:
    text = str(report)
    assert "test_explain.py:" in text
    assert "in graphs" in text
    assert "nonzero" in text


def test_a_report_is_saved_by_its_suffix(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["program"] == "Model"
    with pytest.raises(ValueError, match=r"\.html or \.json"):
        report.save(tmp_path / "r.txt")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_is_drawn_in_a_browser(report: Report, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report.save(page)
    # Added for the test: writes into the page what the browser made of the strip.
    probe = (
        "<script>onload=()=>{const bars=[...document.querySelectorAll('#strip rect')];"
        "const shown=bars.filter(b=>b.getBoundingClientRect().width>0).length;"
        "const drawn=getComputedStyle(bars[0]).fill;"
        "document.title=`${bars.length} bars, ${shown} shown, ${drawn}`}</script>"
    )
    page.write_text(page.read_text("utf-8").replace("</body>", probe + "</body>"), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    result = subprocess.run(
        [str(CHROMIUM), *flags, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    count = len(report.strip)
    assert re.search(rf"<title>{count} bars, {count} shown, rgb\(", result.stdout)
    assert "CONSOLE" not in result.stderr


def test_every_name_in_the_page_is_escaped(report: Report) -> None:
    odd = dataclasses.replace(report, program="<script>alert(1)</script>")
    assert "<script>" not in odd.to_html()


def test_independent_work_is_on_one_side_of_a_cut() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = (x > 0).nonzero()
        b = x.sin().exp()
        return a.float().cos(), b.cos()

    ((_, graph),) = trace(function, (torch.randn(8, 8),), {}).graphs
    assert [part.kind for part in segments(graph)] == [Kind.GRAPH, Kind.GAP, Kind.GRAPH]


def test_segments_hold_every_operation_once() -> None:
    ((_, graph),) = trace(Model(), (torch.randn(4, 16), torch.tensor(2.0)), {}).graphs
    parts = segments(graph)
    kinds = [classify(node)[0] for node in graph.nodes]
    for kind in (Kind.GRAPH, Kind.GAP):
        assert sum(p.operations for p in parts if p.kind is kind) == kinds.count(kind)


def test_an_operation_that_waits_is_a_cut() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigh(x @ x.mT)[0].relu()

    report = estimate("f", function, (torch.randn(8, 8),), {})
    (cut,) = report.cuts
    assert "_linalg_eigh waits for the GPU" in cut.reason
    assert "test_explain.py" in cut.where


@pytest.fixture
def ranks() -> Iterator[None]:
    """Two ranks, of which this process is one and the other is pretended."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def test_collectives_are_outside_of_graphs(ranks: None) -> None:
    from torch.distributed import _functional_collectives as collectives

    def function(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x.sin(), "sum", [0, 1]).cos()

    report = estimate("function", function, (torch.randn(8),), {})
    assert [part.kind for part in report.strip] == ["graph", "gap", "graph"]
    assert "ranks communicate (_c10d_functional::all_reduce)" in report.cuts[0].reason
    names = operators.outside_of_graphs()
    assert {"_c10d_functional::all_reduce_", "_c10d_functional::wait_tensor"} <= set(names)
    assert "aten::mm" not in names


def test_a_histogram_between_bounds_does_not_wait() -> None:
    """Mixtures of experts count their tokens with it."""

    def function(experts: torch.Tensor) -> torch.Tensor:
        return torch.histc(experts.float(), bins=8, min=0, max=7).cumsum(0)

    report = estimate("f", function, (torch.randint(0, 8, (64,)),), {})
    assert not report.cuts
    assert len(report.graphs) == 1


def test_a_program_may_ask_what_the_imagined_gpu_can_do() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.cuda.get_device_capability(x.device) >= (8, 0) else x.exp() + 1

    report = estimate("f", function, (torch.randn(8),), {})
    assert not report.cuts
    assert report.shares[0].total == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the operator runs on this machine")
def test_what_asks_for_a_real_gpu_ends_the_report_and_not_the_program() -> None:
    def function(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((4,), 50, dtype=torch.long)
        return torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, lengths, lengths // 5)

    inputs = (torch.randn(50, 4, 20), torch.randint(1, 20, (4, 10)))
    (cut,) = estimate("f", function, inputs, {}).cuts
    assert "where a real GPU was asked for: aten::_use_cudnn_ctc_loss" in cut.reason
    assert "test_explain.py" in cut.where


def test_an_error_of_the_programs_own_is_raised() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ x[:3]

    with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
        estimate("f", function, (torch.randn(8, 8),), {})


def test_inputs_and_outputs_are_those_of_each_part() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked = (x.sin() > 0).nonzero()
        return picked.float().view(-1).cos(), (x + y).exp()

    report = estimate("f", function, (torch.randn(8), torch.randn(8)), {})
    first, second = report.graphs
    assert (first.name, first.inputs, first.outputs) == ("inference part 0", 2, 2)
    assert (second.name, second.inputs, second.outputs) == ("inference part 1", 1, 1)


def test_a_report_of_counts_does_not_say_that_nothing_ran(report: Report) -> None:
    counted = dataclasses.replace(report, shares=(Share("kernels", 3, 4),))
    assert "Counted, not profiled" in str(counted)
    assert "without running" in str(report)


def test_what_a_script_compiled_is_reported_though_its_models_are_gone() -> None:
    with observing() as observation:
        hints = {"static": frozenset[int](), "mutated": frozenset[int](), "on_host": frozenset[int]()}
        info = PartitionInfo("forward", "forward", 0, 1, True, saved=(), **hints)
        callable_ = Partition(lambda args: args, info, Options()).callable
    refused = Entry(State.REFUSED, reason="a host callback")
    observation.partitions[0].entries[b"key"] = refused
    del callable_
    gc.collect()
    (row,) = measure.graph_rows(observation)
    assert (row.name, row.state) == ("forward", "refused")
    (cut,) = measure.refusals(observation)
    assert "a host callback" in cut.reason


def test_graph_breaks_are_reported() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    observation = trace(function, (torch.randn(8, 8),), {})
    assert len(observation.graphs) == 2
    (cut,) = observation.breaks
    assert cut.kind == "graph break"
    assert "test_explain.py" in cut.where


def test_kernels_are_told_apart_by_what_launched_them() -> None:
    def event(cat: str, name: str, correlation: int, ts: float = 0.0) -> dict[str, object]:
        args = {"correlation": correlation}
        return {"cat": cat, "name": name, "ts": ts, "dur": 2.0, "args": args}

    kernels = profile.kernels_of(
        [
            event("cuda_runtime", "cudaLaunchKernel", 1),
            event("cuda_runtime", "cudaGraphLaunch", 2),
            event("kernel", "b", 2, 2.0),
            event("kernel", "a", 1, 1.0),
            event("kernel", "c", 2, 3.0),
            event("kernel", "d", 9, 4.0),  # launched by the driver's cuGraphLaunch
        ]
    )
    assert [(k.name, k.launch) for k in kernels] == [("a", None), ("b", 2), ("c", 2), ("d", 9)]
    assert [(p.kind, p.width) for p in profile.strip(kernels)] == [
        ("gap", 2.0),
        ("graph", 4.0),
        ("graph", 2.0),
    ]
    counts, _ = profile.shares(kernels)
    assert (counts.in_graphs, counts.total) == (3, 4)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuGraphs]:
    torch._dynamo.reset()
    yield graphs_on_the_cpu.install(monkeypatch)
    torch._dynamo.reset()


def test_generated_kernels_have_operators_and_lines(graphs: CpuGraphs) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, x).relu()
        return y.softmax(-1)

    options = {"pygraph.patches": "none"}
    with torch.no_grad(), observing() as observation:
        torch.compile(program, backend="pygraph", options=options)(torch.ones(4, 4))
    first = program.__code__.co_firstlineno
    kernels = {n: o for n, o in observation.origins.items() if n.startswith("cpp_fused")}
    (origin,) = kernels.values()
    assert {"relu", "amax", "exp", "div"} <= set(origin.operators)
    assert origin.where == (f"{__file__}:{first + 1}", f"{__file__}:{first + 2}")
    product = observation.origins["extern_kernels.mm"]
    assert (product.operators, product.where) == (("mm",), (f"{__file__}:{first + 1}",))

    (name,) = kernels
    traced = [
        profile.Kernel(name, 2.0, 1),
        profile.Kernel("gemm", 9.0, 1),
        profile.Kernel(name, 3.0, None),
    ]
    gemm, ours = measure.kernel_rows(traced, observation.origins)
    assert (gemm.name, gemm.count, gemm.in_graphs, gemm.where) == ("gemm", 1, 1, ())
    assert (ours.count, ours.in_graphs, ours.us) == (2, 1, 5.0)
    assert (ours.operators, ours.where) == (origin.operators, origin.where)
    cells = wording.kernel_cells(ours)
    assert "and" in cells[1] and f"{__file__}:{first + 1}" in cells[2]


def test_kernels_of_one_name_in_two_graphs_have_the_lines_of_both() -> None:
    observation = Observation()
    observation.note_origins({"triton_0": Origin(("relu",), ("a.py:1",))})
    observation.note_origins({"triton_0": Origin(("relu",), ("a.py:2",))})
    assert observation.origins == {"triton_0": Origin(("relu",), ("a.py:1", "a.py:2"))}


def test_the_tables_show_kernels(report: Report) -> None:
    row = KernelRow("triton_<0>", 2, 1, 5.0, ("relu", "exp"), ("a.py:1",))
    shown = dataclasses.replace(report, kernels=(row,))
    assert "triton_<0>" in str(shown) and "relu, exp" in str(shown)
    assert "triton_&lt;0&gt;" in shown.to_html() and "a.py:1" in shown.to_html()
    assert shown.to_dict()["kernels"][0]["operators"] == ("relu", "exp")
    assert "Kernels" not in str(report)


def test_the_benchmarks_say_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        assert run.main(["--only", "no such"]) == 2
        assert "there are: " in capsys.readouterr().err
    else:
        assert run.main(["--suite", "paper", "--only", "EOS"]) == 1
        assert "need an NVIDIA GPU" in capsys.readouterr().err


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    compile_ = torch.compile
    assert cli.main(["explain", "no_such_file.py"]) == 2
    assert "no_such_file.py" in capsys.readouterr().err
    assert torch.compile is compile_


def test_the_command_leaves_the_process_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    script = tmp_path / "script.py"
    script.write_text("import sys, torch\nprint(sys.argv[1:], sys.path[0])\nsys.exit(4)\n")
    before = torch.compile, list(sys.path), sys.modules["__main__"]
    assert cli.main(["explain", str(script), "a"]) == 4
    assert capsys.readouterr().out.startswith(f"['a'] {tmp_path}\nscript.py on ")
    assert (torch.compile, list(sys.path), sys.modules["__main__"]) == before
