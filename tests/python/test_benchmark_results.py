"""What is said of results: tables, details, figures, and what need not be measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_table, run
from benchmarks.paper import PAPER
from benchmarks.rows import is_measured, merge
from benchmarks.variants import names_for


def _document() -> dict[str, Any]:
    def row(workload: str, backend: str, us: float) -> dict[str, Any]:
        times = {"us": us, "latency_us": us, "host_us": us, "us_spread": 0.0, "compile_s": us / 10}
        memory = {"peak_mib": 100.0, "compile_peak_mib": 100.0}
        names = {"workload": workload, "mode": "inference", "batch": 1, "backend": backend}
        counts = {"copied_bytes": 1 << 20, "graphs": {"captured": 2} if backend == "pygraph" else {}}
        shares = {"in_graphs": 0.5, "rel_err": 0.0, "commit": "abc"}
        return {**names, **times, **memory, **counts, **shares}

    times = {"inductor": 100.0, "inductor+graphs": 80.0, "pygraph": 50.0}
    times |= {"hand-made graph": 40.0, "inductor+graphs+transforms": 60.0, "pygraph, every graph": 55.0}
    rows = [row("EOS", backend, us) for backend, us in times.items()]
    rows += [row("ST", backend, 100.0) for backend in ("inductor", "inductor+graphs", "pygraph")]
    machine = {"gpu": "G", "driver": "1", "torch": "2.11", "date": "2026-01-01"}
    return {"machine": machine, "commit": "abc", "rows": rows}


def test_the_summary_is_a_geometric_mean() -> None:
    assert "PyGraph 1.41, Inductor with graphs 1.12" in results_table.summary(_document())


def test_the_table_has_a_line_per_workload() -> None:
    lines = results_table.markdown(_document()).splitlines()
    (line,) = [line for line in lines if line.startswith("| EOS")]
    assert line.count("|") == lines[2].count("|") == lines[3].count("|")
    assert "1.60" in line


def test_a_workload_without_its_polyfills_has_a_line_of_its_own() -> None:
    document = _document()
    summary = results_table.summary(document)
    (own,) = (r for r in document["rows"] if (r["workload"], r["backend"]) == ("EOS", "pygraph"))
    document["rows"].append({**own, "backend": results_table.WITHOUT_POLYFILLS, "us": 64.0})
    lines = [line for line in results_table.markdown(document).splitlines() if "EOS" in line]
    assert lines[1].startswith("| EOS without polyfills, inference |")
    assert ["1.60" in lines[0], "1.25" in lines[1]] == [True, True]
    assert results_table.summary(document) == summary


def test_the_table_says_which_rows_are_from_another_commit() -> None:
    document = _document()
    assert "From commit" not in results_table.markdown(document)
    for row in document["rows"]:
        if row["workload"] == "ST":
            row["commit"] = "old"
    caption = results_table.markdown(document).splitlines()[0]
    assert caption.endswith("in MiB. From commit old: ST.")


def test_the_details_tell_copies_graphs_and_the_distance_to_the_floor() -> None:
    eos, st = results_table.details(_document()).splitlines()[2:]
    assert "| 1.00 | 1.00 | 2 | 0 | 0 | 0.50 | 0.80 |" in eos
    assert "| - | - |" in st


def test_ways_to_indirect_are_drawn() -> None:
    figures = pytest.importorskip("benchmarks.figures")
    results = Path(run.__file__).parent / "results" / "indirection.json"
    figure = figures.indirection(json.loads(results.read_text("utf-8")))
    assert len(figure.axes[0].lines) == 8


def test_a_workload_is_measured_again_only_at_another_commit() -> None:
    document, eos = _document(), next(w for w in PAPER if w.name == "EOS")
    variants = ["inductor", "pygraph"]
    assert is_measured(document, eos, variants)
    assert not is_measured(document, eos, [*variants, "eager"])
    cpu_bound = next(w for w in PAPER if w.name == "ST")
    assert is_measured(document, cpu_bound, names_for(cpu_bound, [*variants, "hand-made graph"]))
    document["commit"] = "def"
    assert not is_measured(document, eos, variants)
    merge(document, eos, [{**document["rows"][0], "rel_err": float("nan")}])
    assert [row["rel_err"] for row in document["rows"] if row["workload"] == "EOS"] == [None]
    assert len(document["rows"]) == 4  # one of EOS, three of ST


def test_figures_and_page_are_written(tmp_path: Path) -> None:
    figures = pytest.importorskip("benchmarks.figures")
    paths = figures.write(_document(), tmp_path)
    assert {path.stem for path in paths} == set(figures.FIGURES)
    for path in paths:
        assert "<svg" in path.read_text("utf-8")
        assert path.with_suffix(".png").stat().st_size > 5000
    html = results_table.page(_document(), paths)
    assert html.count("<svg") == len(paths)
    assert "EOS" in html
