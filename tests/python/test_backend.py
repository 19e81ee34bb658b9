"""The backend on a machine without a GPU: found by its name, plain Inductor, one notice."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.compile import attachment

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about having no GPU")


def test_the_string_alone_is_enough() -> None:
    code = (
        "import torch\n"
        "model = torch.compile(torch.nn.Linear(4, 4), backend='pygraph')\n"
        "print(tuple(model(torch.randn(2, 4)).shape))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(2, 4)"


def test_importing_needs_no_gpu_and_no_engine() -> None:
    loaded = "[name for name in sys.modules if name.startswith('pygraph._engine')]"
    code = f"import pygraph, sys; print(bool({loaded}), len(pygraph.stats()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "0"], done.stderr


def test_every_module_can_be_imported_first() -> None:
    modules = ("compile.backend", "partition.partition", "partition.selector", "verify.verify")
    others = ("record.recorder", "compile.wrapper_bypass", "report.stats", "select.decision_cache")
    for module in (*modules, *others, "runtime", "options", "torch_patches.state"):
        done = subprocess.run(
            [sys.executable, "-c", f"import pygraph.{module}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@needs_no_gpu
def test_results_and_gradients_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    runtime.notice_once.cache_clear()
    runtime.partitions.clear()
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    x = torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, logger="pygraph"):
        model = torch.compile(module, backend="pygraph")
        model(x).sum().backward()
        gradients = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        module(x).sum().backward()
        for gradient, parameter in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
        torch.compile(torch.sin, backend="pygraph")(x)
    assert caplog.text.count("there is no CUDA GPU") == 1
    assert pygraph.stats() == []


def test_a_wrong_option_raises_with_the_valid_ones() -> None:
    model = torch.compile(torch.cos, backend="pygraph", options={"pygraph.graphs": 1})
    with pytest.raises(Exception, match=r"PyGraph has: pygraph\.select"):
        model(torch.randn(3))


def test_a_program_goes_on_after_a_reset_without_graphs() -> None:
    x = torch.randn(4)
    model = torch.compile(torch.sinh, backend="pygraph")
    before = model(x)
    pygraph.reset()
    assert torch.equal(model(x), before)
    torch._dynamo.reset()
    assert torch.equal(model(x), before)


def test_the_engine_loads_and_says_why_there_is_no_driver() -> None:
    engine = runtime.engine()
    if torch.cuda.is_available():
        assert engine.driver_version() >= 12040
        return
    with pytest.raises(engine.DriverError, match="no CUDA driver"):
        engine.driver_version()


@pytest.fixture
def not_loaded() -> Iterator[None]:
    runtime.engine.cache_clear()
    yield
    runtime.engine.cache_clear()


@pytest.mark.usefixtures("not_loaded")
def test_a_release_without_an_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    built = r"PyGraph in \S+pygraph is built for PyTorch \d\.\d+( and \d\.\d+)*"
    to_do = r"build it for this PyTorch \(pip install .*\), or install"
    with pytest.raises(ImportError, match=rf"{built}, this is 2\.99\.0: {to_do}"):
        runtime.engine()


@pytest.mark.usefixtures("not_loaded")
def test_an_engine_built_for_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its file is called."""
    name = runtime.engine().__name__
    runtime.engine.cache_clear()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(built_for="2.99"))
    with pytest.raises(ImportError, match=r"\.so is built for PyTorch 2\.99, this is"):
        runtime.engine()


def test_the_engine_is_that_of_the_installed_release() -> None:
    assert torch.__version__.startswith(f"{runtime.engine().built_for}.")


def test_graphed_callable_checks_its_argument() -> None:
    engine = runtime.engine()
    callable_ = engine.graphed_callable(list, list, 0)
    with pytest.raises(TypeError, match="takes one argument"):
        callable_(1, 2)


@pytest.mark.skipif(
    importlib.util.find_spec("torch._inductor.stream_utils") is None,
    reason="this PyTorch generates no code that uses streams",
)
@pytest.mark.parametrize("placement", [{"stream": 2}, {"mempool": (0, 1)}, None])
def test_a_graph_that_uses_streams_or_pools_of_its_own_is_left_alone(
    placement: dict[str, Any] | None,
) -> None:
    inner = torch.fx.symbolic_trace(lambda x: x.sin())
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    gm.add_module("inner", inner)
    assert not attachment.places_its_work_itself(gm)
    if placement is None:
        with inner.graph.inserting_before(inner.graph.output_node()):
            inner.graph.call_function(torch.ops.streams.wait_stream.default, (0, 1))
    else:
        next(iter(inner.graph.find_nodes(op="call_method"))).meta["custom"] = placement
    assert attachment.places_its_work_itself(gm)
