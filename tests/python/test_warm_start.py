"""Programs that AOTAutograd loads from its cache have the partitions that a compilation gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters

import pygraph
from pygraph import uncapturable
from pygraph.compile import warm_start
from pygraph.compile.backend import backend
from pygraph.torch_patches import sources, state

from .graphs_on_the_cpu import CpuGraphs

X = torch.arange(6.0).reshape(2, 3)


def _program(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.mm(torch.mm(x, weight), weight)


def _start(graphs: CpuGraphs, **options: Any) -> tuple[int, int]:
    """Runs inference as after a start of the process; the misses and hits in AOTAutograd's cache."""
    torch._dynamo.reset()
    counters.clear()
    graphs.clear()
    given = {
        "pygraph.patches": "warm_start",
        "pygraph.warm_start": True,
        **{f"pygraph.{k}": v for k, v in options.items()},
    }
    with torch.no_grad():
        weight = torch.eye(3)
        result = torch.compile(_program(weight), backend="pygraph", options=given)(X)
    assert torch.equal(result, X)
    found = counters["aot_autograd"]
    return found["autograd_cache_miss"] + found["autograd_cache_bypass"], found["autograd_cache_hit"]


def test_another_process_gets_the_same_partitions_for_training_and_inference(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.python.graphs_on_the_cpu"],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout.splitlines())
    (cold, *made), (warm, *loaded) = runs
    assert (cold, warm) == ("2 0", "0 2")
    assert [line.replace("is_loaded=True", "is_loaded=False") for line in loaded] == made != loaded
    assert "kind='forward'" in made[0] and "kind='backward'" in made[0]
    assert made[0].endswith("['forward', 'backward', 'inference']")
    assert "saved=(0, 2, 3)" in made[0]


def test_a_loaded_program_takes_the_options_of_its_own_compilation(graphs: CpuGraphs) -> None:
    assert _start(graphs) == (1, 0)
    infos, routes = graphs.infos, graphs.routes
    assert len(infos) == 1 and len(routes) == 2  # the second one passes by AOTAutograd's wrappers
    assert _start(graphs, select="always", lanes=1) == (0, 1)
    assert (graphs.infos, graphs.routes) == (infos, routes)
    assert graphs.infos[0].is_loaded and not infos[0].is_loaded
    assert graphs.options[0].select == "always" and graphs.options[0].lanes == 1


def test_sizes_that_vary_and_results_that_alias_come_from_the_cache(graphs: CpuGraphs) -> None:
    weight = torch.eye(3)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.mm(x, weight)
        return y, y.view(-1), x

    made = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        graphs.clear()
        options = {"pygraph.patches": "warm_start", "pygraph.warm_start": True}
        function = torch.compile(program, backend="pygraph", dynamic=True, options=options)
        for size in (4, 7):
            x = torch.ones(size, 3)
            y, flat, same = function(x)
            assert torch.equal(y, x) and flat.shape == (3 * size,) and same is x
            assert flat.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        made.append((graphs.infos, graphs.routes, graphs.calls))
    assert made[0] == made[1] and len(made[0][0]) == 1
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_what_changes_the_code_is_in_the_key(
    graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _start(graphs) == (1, 0)
    assert _start(graphs, transforms="none") == (1, 0)
    assert _start(graphs) == (0, 1)
    with monkeypatch.context() as patch:  # an operator that cuts programs from now on
        patch.setitem(uncapturable._found, "aten::mm", "a test")
        assert _start(graphs) == (1, 0)
        assert _start(graphs) == (0, 1)
    assert _start(graphs) == (0, 1)


def test_cuts_are_in_the_key_in_an_order_of_their_own(
    graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a set differs between processes."""
    names = [f"pygraph_test::operator_{i}" for i in range(20)]
    cuts = []

    def note(key: str | None, facts: warm_start.Facts) -> None:
        cuts.append(inductor_config.custom_should_partition_ops[-len(names) :])

    monkeypatch.setattr(warm_start, "keep", note)
    for name in reversed(names):
        monkeypatch.setitem(uncapturable._found, name, "a test")
    assert _start(graphs) == (1, 0)
    assert cuts == [sorted(names)]


def test_programs_of_inductor_are_not_loaded(graphs: CpuGraphs) -> None:
    weight = torch.eye(3)
    with torch.no_grad():
        settings = {"triton.cudagraphs": True, "graph_partition": True}
        torch.compile(_program(weight), options=settings)(X)
    assert graphs.infos == []
    assert _start(graphs) == (1, 0)
    assert len(graphs.infos) == 1


def test_it_can_be_switched_off(graphs: CpuGraphs) -> None:
    assert _start(graphs, warm_start=False) == (0, 0)
    assert _start(graphs) == (1, 0)
    with functorch_config.patch(enable_autograd_cache=False):  # PyTorch's own switch
        assert _start(graphs) == (0, 0)
    with functorch_config.patch(bundled_autograd_cache=True):  # entries of another form
        assert _start(graphs) == (0, 0)
    with functorch_config.patch(strict_autograd_cache=True):  # a miss is an error
        assert _start(graphs) == (0, 0)
    with functorch_config.patch(_sync_decision_cross_ranks=True):  # ranks wait for each other
        assert _start(graphs) == (0, 0)
    assert _start(graphs) == (0, 1)


def _facts(folder: Path) -> Path:
    (path,) = folder.glob("pygraph/programs-v1/*.json")
    return path


_DAMAGED = {
    "unreadable": lambda facts: "{",
    "cut off": lambda facts: facts[: len(facts) // 2],
    "empty": lambda facts: "",
    "no facts": lambda facts: "[1, 2]",
    "of another graph": lambda facts: json.dumps({**json.loads(facts), "key": "another"}),
    "of other types": lambda facts: json.dumps({**json.loads(facts), "input_count": "2"}),
    "of missing inputs": lambda facts: json.dumps({**json.loads(facts), "on_host": [7]}),
}


@pytest.mark.parametrize("damage", ["missing", *_DAMAGED])
def test_without_its_facts_a_program_is_compiled(
    graphs: CpuGraphs, tmp_path: Path, damage: str
) -> None:
    assert _start(graphs) == (1, 0)
    infos = graphs.infos
    path = _facts(tmp_path)
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(_DAMAGED[damage](path.read_text()))
    assert _start(graphs) == (1, 0)
    assert graphs.infos == infos
    assert _start(graphs) == (0, 1)  # they were written again


def test_an_error_while_attaching_is_a_miss(graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _start(graphs) == (1, 0)
    routes = graphs.routes
    clear = graphs.clear

    def fail() -> None:
        clear()
        graphs.error = RuntimeError("a test")

    monkeypatch.setattr(graphs, "clear", fail)
    assert _start(graphs) == (1, 0)
    assert graphs.error is None and len(graphs.infos) == 1
    assert graphs.routes == routes


def test_a_pytorch_that_loads_in_another_way_compiles(
    graphs: CpuGraphs, fresh_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _start(graphs) == (1, 0)
    name = "torch._functorch._aot_autograd.aot_autograd_result.CompiledForward"
    for attribute in ("_used", "_tried"):
        monkeypatch.setattr(state, attribute, set())
    with monkeypatch.context() as patch:
        digest = sources.digest
        patch.setattr(sources, "digest", lambda n, *more: "another" if n == name else digest(n, *more))
        assert _start(graphs) == (0, 0)
        (row,) = (row for row in pygraph.status().patches if row.name == "warm_start")
        assert (row.state, row.reason) == ("unknown source", f"{name} has changed")


def test_it_is_one_of_the_patches_that_the_user_switches(graphs: CpuGraphs, fresh_state: None) -> None:
    assert _start(graphs, patches="none") == (0, 0)
    assert "warm_start" not in {r.name for r in pygraph.status().patches if r.state == "active"}
    assert _start(graphs) == (1, 0)
    assert "warm_start" in {r.name for r in pygraph.status().patches if r.state == "active"}


def test_a_folder_that_cannot_be_written_only_costs_warm_starts(
    graphs: CpuGraphs, tmp_path: Path
) -> None:
    (tmp_path / "pygraph").write_text("a file, not a folder")
    assert _start(graphs) == (1, 0)
    assert _start(graphs) == (1, 0)


def test_inputs_on_the_host_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    facts = warm_start.Facts(5, frozenset({1, 4}))
    warm_start.keep("key", facts)
    assert warm_start.find("key") == facts
    warm_start.keep(None, facts)
    with pytest.raises(OSError):
        warm_start.find("other")


def test_reports_see_a_compilation(graphs: CpuGraphs) -> None:
    from pygraph.observations import observing

    assert _start(graphs) == (1, 0)
    with observing() as observation:
        assert _start(graphs) == (0, 0)
    assert len(observation.graphs) == 1
    assert backend.compiler_name == "pygraph"
