"""The suite of whole steps: its programs, what is measured of them, and what is left after a crash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import run
from benchmarks.lanes import Outcome
from benchmarks.rows import Collected
from benchmarks.steps import large, learning, measure, small, table, variants
from benchmarks.steps.measure import distance, measure_steps
from benchmarks.steps.program import Batch, Program, Setting, StepWorkload
from benchmarks.steps.workloads import STEPS
from benchmarks.suites import SUITES

from .graphed_programs import replays


class _Names(TorchDispatchMode):
    """Of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("workload", STEPS, ids=lambda workload: workload.name)
def test_a_step_leaves_no_gradients_and_never_waits(
    workload: StepWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, _: self)
    with FakeTensorMode(allow_non_fake_inputs=True):
        variant = variants.make("eager", workload, "cpu", ())
        batch = workload.make_batch(workload.batch, "cpu")
        variant.step(batch)
        with _Names() as names:
            losses = variant.step(batch)
    assert all(loss.shape == () and not loss.requires_grad for loss in losses)
    assert all(p.grad is None for module in variant.program.modules for p in module.parameters())
    # A constant that is made on the host is copied to the GPU.
    waiting = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "lift_fresh"}
    assert not names.seen & waiting
    assert "_fused_adamw_" in names.seen


def _tiny_gan(setting: Setting) -> Program:
    return learning.dcgan(setting, features=2)


def _workload(name: str, build: Callable[..., Program], batch: Callable[..., Batch]) -> StepWorkload:
    return StepWorkload(name, 4, build, batch)


_TINY = [
    _workload("mlp", partial(small.mlp, width=8), partial(small.mlp_batch, width=8)),
    _workload("transformer", partial(small.transformer, width=64, layers=1), small.tokens),
    _workload("ppo", learning.ppo, learning.ppo_batch),
    _workload("sac", learning.sac, learning.sac_batch),
    _workload("dcgan", _tiny_gan, learning.dcgan_batch),
    _workload(
        "gpt2_lora",
        partial(large.lora, n_layer=1, n_embd=16, n_head=2, vocab_size=32),
        partial(large.text, length=8, vocabulary=32),
    ),
]


@pytest.mark.parametrize("workload", _TINY, ids=lambda workload: workload.name)
def test_a_step_has_a_graph_and_trains_alike(
    workload: StepWorkload, partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)  # no graph draws numbers on the CPU
    torch.manual_seed(0)
    batches = [workload.make_batch(4, "cpu") for _ in range(3)]
    eager, graphed = (
        variants.make(name, workload, "cpu", batches[0]) for name in ("eager", "pygraph.graph eager")
    )
    for _ in range(2):  # the second time with a graph from the beginning
        torch.manual_seed(1)
        for batch in batches * 3:
            expected = eager.step(batch)
        torch.manual_seed(1)
        for batch in batches * 3:
            found = graphed.step(batch)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        values = zip(eager.program.tensors(), graphed.program.tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in values)
        for variant in (eager, graphed):
            variant.program.restart(variant.initial)
    assert replays(partitions) >= 9


@pytest.fixture
def no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not what is tested."""
    monkeypatch.setattr(measure, "_BLOCK_SECONDS", 0.001)
    monkeypatch.setattr(measure, "_ROUNDS", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs made by hand must fail")
def test_a_variant_that_fails_has_a_row_with_its_error(
    no_blocks: None, partitions: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = torch._dynamo.config.recompile_limit
    names = ("eager", "hand-made", "inductor", "pygraph.graph eager")
    try:
        rows = {row.variant: row for row in measure_steps(_TINY[0], names, device="cpu")}
    finally:
        torch._dynamo.config.recompile_limit = limit
    assert list(rows) == ["hand-made", "eager", "inductor", "pygraph.graph eager"]
    failed = rows.pop("hand-made")
    assert failed.error and failed.us is None
    assert all(row.us and row.host_us and not row.error for row in rows.values())
    assert rows["eager"].rel_err == rows["pygraph.graph eager"].rel_err == 0
    assert rows["inductor"].rel_err is not None and rows["inductor"].rel_err < 1e-4
    assert replays(partitions) > 10
    assert "NOW hand-made\n" in capsys.readouterr().out


def test_a_variant_that_fails_while_it_is_timed_ends_nothing(
    no_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = variants.Variant.step

    def failing(self: variants.Variant, batch: Batch) -> Any:
        nonlocal steps
        if self.name == "pygraph.graph eager":
            steps += 1
            if steps > 50:
                raise RuntimeError("one too many")
        return step(self, batch)

    monkeypatch.setattr(variants.Variant, "step", failing)
    monkeypatch.setattr(measure, "_ROUNDS", 20)
    names = ["eager", "pygraph.graph eager"]
    rows = {row.variant: row for row in measure_steps(_TINY[0], names, device="cpu")}
    rows = {
        r.variant: r for r in measure_steps(_TINY[0], ["eager", "pygraph.graph eager"], None, "cpu")
    }
    assert rows["pygraph.graph eager"].error == "RuntimeError: one too many"
    assert rows["eager"].us and not rows["eager"].error


def test_the_variant_with_an_option_that_is_not_there_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variants, "has_pieces", lambda: False)
    assert variants.names_for(variants.VARIANTS) == [
        name for name in variants.VARIANTS if name != variants.PIECES
    ]
    monkeypatch.setattr(variants, "has_pieces", lambda: True)
    assert variants.names_for(variants.VARIANTS) == list(variants.VARIANTS)
    assert variants.names_for(["hand-made", "eager"]) == ["eager", "hand-made"]


def test_the_distance_is_that_of_losses_or_of_values() -> None:
    losses, values = torch.tensor([3.0, 4.0]), torch.ones(4)
    assert distance([losses, values], [losses.clone(), values.clone()]) == 0
    assert distance([losses, values], [losses + torch.tensor([0.0, 1.0]), values]) == pytest.approx(0.2)
    assert distance([losses, values], [losses, values * 1.5]) == pytest.approx(0.5)
    assert distance([losses, values], [losses, values * torch.nan]) != 0


def _row(workload: str, variant: str, us: float | None = 100.0, error: str = "") -> dict[str, Any]:
    numbers = {"us": us, "us_spread": 0.02, "host_us": us, "peak_mib": us, "compile_s": 1.0}
    names = {"workload": workload, "variant": variant, "batch": 4, "commit": "abc"}
    return {**names, **numbers, "rel_err": 0.0, "graphs": {}, "reasons": [], "error": error}


def test_what_a_process_did_not_come_to_is_left_for_another_one() -> None:
    suite, mlp = SUITES["steps"], STEPS[0]
    collected = Collected(suite, [mlp], ["eager", "inductor", "pygraph", "hand-made"])
    output = "NOW eager\nNOW inductor\nNOW pygraph\n"
    failed = _row("mlp", "inductor", None, "no")
    rows = collected.add(mlp, [failed], Outcome(output, -11))
    assert [(row["variant"], row["error"]) for row in rows] == [
        ("inductor", "no"),
        ("pygraph", "the process ended with -11"),
    ]
    assert collected.left[mlp.key] == ["eager", "hand-made"]
    rows = collected.add(mlp, [_row("mlp", "eager")], Outcome("NOW eager\nNOW hand-made\n", None))
    assert {row["variant"]: row["error"] for row in rows} == {
        "eager": "",
        "inductor": "no",
        "pygraph": "the process ended with -11",
        "hand-made": "the process: its time was up",
    }
    assert collected.left[mlp.key] == ["eager"]
    collected.add(mlp, [_row("mlp", "eager")], Outcome("NOW eager\n", 0))
    assert collected.left[mlp.key] == []


# A worker that ends in the middle of a variant, as one whose graph breaks the GPU does.
_CRASHING = """
import json, os, sys
row, *names = json.loads(sys.argv[1])
for name in names:
    print("NOW " + name, flush=True)
    if name == "inductor":
        os._exit(7)
for name in names:
    print("ROW " + json.dumps({**row, "variant": name}), flush=True)
"""


@pytest.mark.parametrize("lanes", [[], ["--gpus", "0", "0"]], ids=["alone", "in lanes"])
def test_the_other_variants_are_measured_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: list[str]
) -> None:
    def command(_: Any, workload: StepWorkload, names: list[str], token: str = "") -> list[str]:
        words = json.dumps([_row(workload.name, ""), *names])
        return [sys.executable, "-c", _CRASHING, words, token]

    monkeypatch.setattr(run, "_command", command)
    arguments = ["--suite", "steps", "--device", "cpu", "--out", str(tmp_path), "--only", "mlp", "ppo"]
    names = ["eager", "inductor", "hand-made"]
    assert run.main([*arguments, *lanes, "--variants", *names]) == 0
    rows = json.loads((tmp_path / "cpu_steps.json").read_text())["rows"]
    errors = {(row["workload"], row["variant"]): row["error"] for row in rows}
    crash = "the process ended with 7"
    assert errors == {(w, n): crash * (n == "inductor") for w in ("mlp", "ppo") for n in names}
    assert (
        "- mlp, Inductor: failed: the process ended with 7" in (tmp_path / "cpu_steps.md").read_text()
    )


def _document() -> dict[str, Any]:
    machine = {"gpu": "G", "driver": "1", "torch": "2.11", "date": "2026-01-01"}
    times = {"eager": 800.0, "inductor": 400.0, "pygraph.graph": 50.0, "hand-made": 40.0}
    rows = [_row("sac", name, us) for name, us in times.items()]
    rows += [_row("mlp", "eager"), _row("mlp", "pygraph.graph", None, "broken")]
    rows[2]["reasons"] = ["it waits for the GPU"]
    return {"machine": machine, "commit": "abc", "rows": rows}


def test_the_table_has_times_ratios_and_failures() -> None:
    text = table.tables(_document())
    mlp, sac = (line for line in text.splitlines()[4:6])
    assert mlp == "| mlp | 4 | 100 | - | failed | - | - | - |"
    assert sac == "| sac | 4 | 800 | 400 | 50 | 40 | 8.00 | 1.25 |"
    assert "1 workloads: 8.00" in text
    assert "- mlp, `pygraph.graph`: failed: broken" in text
    assert "- sac, `pygraph.graph`: it waits for the GPU" in text


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    figures = pytest.importorskip("benchmarks.figures")
    (path,) = figures.write(_document(), tmp_path)
    assert path.name == "steps.svg" and "<svg" in path.read_text("utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's results are of no use there")
def test_the_runner_writes_what_it_measured(tmp_path: Path, no_blocks: None) -> None:
    arguments = ["--suite", "steps", "--device", "cpu", "--out", str(tmp_path), "--only", "ppo"]
    assert run.main([*arguments, "--variants", "eager", "hand-made eager", "--gpus", "0"]) == 0
    document = json.loads((tmp_path / "cpu_steps.json").read_text())
    rows = {row["variant"]: row for row in document["rows"]}
    assert rows["eager"]["rel_err"] == 0 and rows["eager"]["us"] > 0
    assert rows["hand-made eager"]["error"]
    assert "| ppo | 256 |" in (tmp_path / "cpu_steps.md").read_text()


def test_a_variant_of_another_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--variants", "hand-made"], ["--device", "cpu"]):
        with pytest.raises(SystemExit):
            run.parse(["--suite", "quick", *arguments])
    assert "has no variant 'hand-made'" in capsys.readouterr().err
