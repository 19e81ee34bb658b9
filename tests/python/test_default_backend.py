"""``torch.compile`` of a program that PyGraph runs: which calls of it use PyGraph."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph import default_backend
from pygraph.compile.backend import Backend

# In place of PyTorch: tells with which arguments it was called.
_STAND_IN = """
import types
default = "inductor"
compiler = types.SimpleNamespace()
if {has_default}:
    compiler.get_default_backend = lambda: default
def compile(model=None, *, backend={backend!r}, mode=None, options=None):
    print("compile", backend, mode, options)
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The mode and options of each graph that PyGraph's backend compiles."""
    seen: list[Any] = []
    monkeypatch.setattr(torch, "compile", torch.compile)  # put back afterwards
    call = Backend.__call__

    def noted(self: Backend, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        seen.append(kwargs)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Backend, "__call__", noted)
    torch._dynamo.reset()
    default_backend.install()
    return seen


def test_every_way_to_compile_uses_it(compiled: list[Any]) -> None:
    x = torch.ones(2, 3)

    @torch.compile
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @torch.compile(mode="reduce-overhead", dynamic=False)
    def with_mode(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = Module()
    module.compile()
    plain(x), with_mode(x), module(x)
    torch.compile(torch.nn.Linear(3, 2), backend="inductor")(x)
    torch.compile(lambda x: x + 3, options={"max_autotune": False})(x)
    modes = [None, "reduce-overhead", None, None, None]
    assert [kwargs.get("mode") for kwargs in compiled] == modes
    assert compiled[-1]["options"] == {"max_autotune": False}


def _run_with_summary(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pygraph", "--summary", "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_compiled_function_may_compile_another(tmp_path: Path) -> None:
    """Dynamo treats torch.compile by itself, also in PyGraph's place."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "def inner(x): return x.sin()\n"
        "@torch.compile\n"
        "def outer(x): return torch.compile(inner)(x) + 1\n"
        "print(outer(torch.zeros(3)).tolist())\n"
    )
    done = _run_with_summary(tmp_path)
    assert done.stdout == "[1.0, 1.0, 1.0]\n", done.stderr
    assert done.returncode == 0
    if not torch.cuda.is_available():
        assert done.stderr.endswith("pygraph: nothing was captured: there is no CUDA GPU\n")


def test_what_asks_for_another_backend_or_for_no_graphs_gets_it(compiled: list[Any]) -> None:
    x = torch.ones(3)
    for arguments in (
        {"backend": "eager"},
        {"backend": lambda gm, inputs: gm.forward},
        {"options": {"triton.cudagraphs": False}},
        {"options": {"cpp_wrapper": True}},
    ):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, **arguments)(x)
    assert compiled == []


def test_each_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program names PyGraph itself."""
    told: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model=None, **kwargs: told.append(kwargs["backend"]))
    default_backend.install(lambda: told.append("told"))
    torch.compile(abs)
    torch.compile(abs, backend="pygraph")
    torch.compile(abs, backend="eager")
    assert told == ["told", "pygraph", "told", "pygraph", "eager"]


def test_models_that_libraries_compile_use_it(compiled: list[Any]) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet10t", num_classes=3).eval()
    with torch.no_grad():
        model.compile(backend="inductor")  # as timm's own training script does
        model(torch.randn(1, 3, 32, 32))
    assert len(compiled) == 1


def test_pytorchs_default_has_the_same_effect() -> None:
    set_default_backend = getattr(torch.compiler, "set_default_backend", None)
    if set_default_backend is None:
        pytest.skip("PyTorch has had set_default_backend since 2.13")
    seen: list[Any] = []
    call = Backend.__call__
    try:
        Backend.__call__ = lambda self, *a, **k: (seen.append(k), call(self, *a, **k))[1]  # type: ignore[method-assign]
        set_default_backend("pygraph")
        torch.compile(lambda x: x + 1)(torch.ones(3))
    finally:
        Backend.__call__ = call  # type: ignore[method-assign]
        set_default_backend(None)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("has_default", "backend"), [(False, "inductor"), (True, None)], ids=["2.11", "2.13"]
)
def test_a_program_imports_pytorch_itself(tmp_path: Path, has_default: bool, backend: Any) -> None:
    """And may look for it, set variables, and fail to import it, before."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os\nif 'READY' not in os.environ: raise ImportError('not ready')\n"
        + _STAND_IN.format(has_default=has_default, backend=backend)
    )
    (tmp_path / "program.py").write_text(
        "import importlib.util, os, sys\n"
        "print('torch' in sys.modules, importlib.util.find_spec('torch') is not None)\n"
        "try:\n    import torch\nexcept ImportError as e:\n    print(e)\n"
        "os.environ['READY'] = '1'\n"
        "from torch import compile\n"
        "import torch\n"
        "compile(1)\n"
        "torch.compile(1, backend='eager')\n"
        "torch.compile(1, mode='max-autotune', options={'a': 1})\n"
        "torch.default = 'eager'\n"
        "torch.compile(1)\n"
        "print(type(torch.__loader__).__name__, [f for f in sys.meta_path if 'pygraph' in str(f)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pygraph", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    other = f"compile {backend} None None" if has_default else "compile pygraph None None"
    assert done.stdout.splitlines() == [
        "False True",
        "not ready",
        "compile pygraph None None",
        "compile eager None None",
        "compile pygraph max-autotune {'a': 1}",
        other,
        "SourceFileLoader []",
    ]


def test_the_package_offers_its_names() -> None:
    assert set(pygraph.__all__) <= set(dir(pygraph))
    for name in pygraph.__all__:
        assert getattr(pygraph, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = pygraph.no_such_name


def test_unknown_modes_and_options_raise_as_without_pygraph(compiled: list[Any]) -> None:
    for arguments in (
        {"mode": "bogus"},
        {"options": {"nope": 1}},
        {"options": {"max_autotune": "yes"}},
    ):
        with pytest.raises(RuntimeError):
            torch.compile(lambda x: x + 1, **arguments)  # type: ignore[call-overload]
    assert compiled == []


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="PyTorch 2.13 and later")
def test_a_default_backend_of_the_programs_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda model=None, **kwargs: model)
    default_backend.install(lambda: told.append(1))
    monkeypatch.setattr(torch.compiler, "get_default_backend", lambda: "pygraph")
    torch.compile(torch.nn.Linear(3, 2))
    assert told == [1]


@pytest.mark.skipif(
    "name" not in inspect.signature(torch.compile).parameters, reason="PyTorch 2.15 and later"
)
def test_a_compilation_may_have_a_name() -> None:
    model = torch.compile(lambda x: x + 1, backend="pygraph", name="step")  # type: ignore[call-overload]
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 2.0))


def test_finders_of_another_kind_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "class Old: find_module = staticmethod(lambda *a: None)\n"
        "sys.meta_path.insert(1, Old())\n"
        "import torch\n"
        "print(torch.ones(1).tolist())\n"
    )
    done = _run_with_summary(tmp_path)
    assert done.stdout == "[1.0]\n", done.stderr
    assert done.stderr == "pygraph: torch.compile was not called with PyGraph\n"
