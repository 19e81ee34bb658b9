"""The table of patches fits the installed PyTorch, and tells other sources."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo import eval_frame

import pygraph
from pygraph.torch_patches import check, sources
from pygraph.torch_patches.digests import GONE
from pygraph.torch_patches.table import PATCHES, RELEASES, REQUIRED, Patch

from .test_layout import _imports

_ROOT = Path(pygraph.__file__).parent
_INTERNALS = tuple(
    f"torch._dynamo.{name}"
    for name in (
        *("guards", "codegen", "eval_frame", "symbolic_convert", "output_graph"),
        *("bytecode_transformation", "source", "mutation_guard", "convert_frame"),
    )
)


def _patch(name: str) -> Patch:
    return next(patch for patch in PATCHES if patch.name == name)


@pytest.mark.parametrize("patch", (*PATCHES, *REQUIRED), ids=lambda patch: patch.name)
def test_an_entry_is_complete(patch: Patch) -> None:
    assert patch.replaces and patch.saves and patch.releases
    assert len(set(patch.names)) == len(patch.names)
    assert set(patch.releases) | set(patch.left_off) == set(RELEASES)
    assert not set(patch.releases) & set(patch.left_off)
    for release in patch.releases:
        assert all(sources.known_digest(name, release) is not None for name in patch.names)
        assert all(sources.known_digest(name, release) != GONE for name in patch.replaces)
    module, function = patch.apply.split(":")
    assert callable(sources.resolve(f"{module}.{function}"))


def _documented() -> dict[str, tuple[bool, str, str]]:
    """Of the page's table: whether each patch is exact, its scope, and the releases."""
    page = Path(__file__).parents[2] / "docs/reference/patches.md"
    found = {}
    for line in page.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            names = re.findall(r"`(\w+)`", cells[0])
            scopes = cells[2].split(", ") if len(names) > 1 else [cells[2]]
            releases = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[3])
            for name, scope in zip(names, scopes, strict=True):
                found[name] = ("not exact" not in cells[0], scope, releases)
    return found


def test_the_page_has_the_table() -> None:
    words = {RELEASES: "all", RELEASES[:1]: RELEASES[0]}
    for patch in PATCHES:
        first, last = patch.releases[0], patch.releases[-1]
        part = f"from {first}" if last == RELEASES[-1] else f"to {last}"
        releases = words.get(patch.releases, part)
        assert _documented()[patch.name] == (patch.exact, patch.scope, releases), patch.name
    assert _documented().keys() == {patch.name for patch in PATCHES}


def test_names_are_unique() -> None:
    assert len({patch.name for patch in (*PATCHES, *REQUIRED)}) == len(PATCHES) + len(REQUIRED)


def test_dynamos_internals_are_imported_in_two_places() -> None:
    found = set()
    for path in _ROOT.rglob("*.py"):
        relative = path.relative_to(_ROOT)
        imported = {module for _, module in _imports(path)}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch._dynamo":
                imported |= {f"torch._dynamo.{alias.name}" for alias in node.names}
        if any(module.startswith(_INTERNALS) for module in imported):
            found.add(relative.parts[0])
    assert found == {"torch_patches", "dynamo_program.py"}


def test_the_backend_has_one_call() -> None:
    text = (_ROOT / "compile" / "backend.py").read_text()
    assert text.count("torch_patches.apply(") == text.count("torch_patches.install(") == 1
    users = [p for p in _ROOT.rglob("*.py") if "torch_patches" in p.read_text()]
    rooms = {path.relative_to(_ROOT).parts[0] for path in users}
    known = {"__init__.py", "torch_patches", "compile", "options.py", "dynamo_program.py"}
    # Graphed callables want profiles to be safe; polyfills store digests in the same way.
    assert rooms == known | {"callables", "polyfills"}


def test_a_changed_function_and_one_that_is_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = dataclasses.replace(
        _patch("pregraph_range"),
        replaces=("torch.nn.Module.forward_like_nothing_else",),
        relies_on=("torch.nn.Module.apply", "torch.no_such_module.function", "torch.pi"),
        releases=(sources.release(),),
        left_off={},
    )
    known = {name: {sources.release(): "0" * 16} for name in patch.names[:3]}
    monkeypatch.setattr(sources, "DIGESTS", {**known, "torch.pi": {sources.release(): ""}})
    found = [(d.name, d.kind) for d in sources.differences(patch, sources.release())]
    assert found == [
        ("torch.nn.Module.forward_like_nothing_else", "gone"),
        ("torch.nn.Module.apply", "changed"),
        ("torch.no_such_module.function", "gone"),
    ]
    assert "torch.nn.Module.apply has changed" in sources.why_not(patch)


def test_a_release_that_nobody_has_checked_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert sources.why_not(PATCHES[0]) == "not known to fit PyTorch 2.99"


def test_what_a_patch_has_replaced_is_still_known() -> None:
    pygraph.torch_patches.install(frozenset(patch.name for patch in PATCHES))
    active = [patch for patch in PATCHES if sources.release() in patch.releases]
    assert [patch.name for patch in active if sources.why_not(patch)] == []


def _check(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys, torch; {before}; sys.argv[1:] = {list(arguments)!r}; "
    code += 'runpy.run_module("pygraph.torch_patches.check", run_name="__main__")'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_check_says_that_all_match() -> None:
    result = _check()
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"PyTorch {torch.__version__}"
    assert [line.split(":")[0].split(maxsplit=1) for line in lines[1:]] == [
        [patch.name, "match" if sources.release() in patch.releases else "left off"]
        for patch in (*PATCHES, *REQUIRED)
    ]


def test_check_names_what_is_not_as_known() -> None:
    changes = (
        "import torch._dynamo.guards as g, torch._dynamo.eval_frame as e; "
        "g.from_numpy = g.normalize_range_iter; "
        "del e._set_in_optimized_module; torch.__version__ = '2.99.0'"
    )
    result = _check(before=changes)
    assert result.returncode == 1
    assert "number_guards      changed (compared with 2.15)" in result.stdout
    assert "    torch._dynamo.guards.from_numpy has changed\n" in result.stdout
    assert "module_flag        gone" in result.stdout
    assert "    torch._dynamo.eval_frame._set_in_optimized_module is gone\n" in result.stdout
    if sources.release() == RELEASES[-1]:
        assert "saved_hooks_guard  match (compared with 2.15)" in result.stdout


def test_digests_that_differ_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torch._dynamo.guards.from_numpy"
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(sources, "_digests", lambda: {name: "f" * 16})
    check.print_digests()
    assert f'"{name}": "2.99": "{"f" * 16}"\n' in capsys.readouterr().out


def test_an_unknown_function_is_kept(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = _patch("module_flag")
    monkeypatch.setattr(sources, "_digests", lambda: {patch.replaces[0]: "another"})
    before = eval_frame._set_in_optimized_module
    monkeypatch.setattr(eval_frame, "_set_in_optimized_module", before)
    pygraph.torch_patches.install(frozenset({"module_flag"}))
    assert eval_frame._set_in_optimized_module is before
    row = next(row for row in pygraph.status().patches if row.name == "module_flag")
    assert row.state == "unknown source"
    assert row.reason == f"{patch.replaces[0]} has changed"
