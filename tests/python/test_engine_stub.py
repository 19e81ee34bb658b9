"""The engine's stub has what the extension has; the module's type and the tests' fake have that."""

from __future__ import annotations

import ast
import builtins
import inspect
from pathlib import Path

import pytest

import pygraph
from pygraph import runtime

from .fake_engine import FakeGraph

_ROOT = Path(pygraph.__file__).parent
_CALLED = "__call__"  # the only special method that the stub speaks of besides constructors

# By name: "method", "read only" or "attribute".
Members = dict[str, str]


def _tree(file: str) -> ast.Module:
    return ast.parse((_ROOT / file).read_text("utf-8"))


def members_in_stub(class_: ast.ClassDef) -> Members:
    found: Members = {}
    for node in class_.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_final = ast.unparse(node.annotation).startswith("Final")
            found[node.target.id] = "read only" if is_final else "attribute"
        elif isinstance(node, ast.FunctionDef) and node.name != "__init__":
            found[node.name] = "read only" if node.decorator_list else "method"
    return found


def _nodes_in_stub() -> list[ast.ClassDef]:
    """Those of the extension's classes."""
    nodes = [node for node in _tree("_engine.pyi").body if isinstance(node, ast.ClassDef)]
    return [node for node in nodes if node.name != "Module"]


def classes_in_stub() -> dict[str, Members]:
    """All classes but derived ones, which have no members of their own."""
    return {node.name: members_in_stub(node) for node in _nodes_in_stub() if not node.bases}


def _names_in_stub() -> set[str]:
    return {node.name for node in _nodes_in_stub()} | members_in_stub(_class("Module")).keys()


def _members_in_extension(class_: type) -> Members:
    found: Members = {}
    for name, value in vars(class_).items():
        if name.startswith("_") and name != _CALLED:
            continue
        if isinstance(value, property):
            found[name] = "attribute" if value.fset else "read only"
        else:
            found[name] = "method" if callable(value) else "attribute"
    return found


def test_the_stub_names_all_that_the_extension_has() -> None:
    assert _names_in_stub() == {name for name in dir(runtime.engine()) if not name.startswith("_")}


@pytest.mark.parametrize("name", classes_in_stub())
def test_a_class_has_the_members_that_the_stub_gives_it(name: str) -> None:
    assert classes_in_stub()[name] == _members_in_extension(getattr(runtime.engine(), name))


def test_derived_classes_are_those_of_the_stub() -> None:
    """Exceptions, and a number."""
    bases = {node.name: ast.unparse(node.bases[0]) for node in _nodes_in_stub() if node.bases}
    for name in _names_in_stub() - classes_in_stub().keys():
        found = getattr(runtime.engine(), name)
        assert isinstance(found, type) is (name in bases)
        if name in bases:
            assert issubclass(found, getattr(builtins, bases[name]))


def test_the_type_of_the_module_has_every_class() -> None:
    (class_,) = (node for node in ast.walk(_tree("engine.py")) if isinstance(node, ast.ClassDef))
    assert [ast.unparse(base) for base in class_.bases] == ["_engine.Module"]
    assigned = [node.targets[0] for node in class_.body if isinstance(node, ast.Assign)]
    found = {target.id for target in assigned if isinstance(target, ast.Name)}
    assert found == {node.name for node in _nodes_in_stub()}


def _class(name: str) -> ast.ClassDef:
    (node,) = (n for n in _tree("_engine.pyi").body if isinstance(n, ast.ClassDef) and n.name == name)
    return node


def test_the_fake_graph_has_the_members_of_the_engines() -> None:
    expected = classes_in_stub()["CapturedGraph"]
    found = {name: value for name, value in vars(FakeGraph).items() if not name.startswith("_")}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert inspect.isfunction(value) is (expected[name] == "method"), name


def test_the_fake_graphs_methods_take_what_the_engines_take() -> None:
    for node in _class("CapturedGraph").body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            parameters = inspect.signature(getattr(FakeGraph, node.name)).parameters.values()
            assert [p.name for p in parameters] == [argument.arg for argument in node.args.args]
            defaults = sum(p.default is not inspect.Parameter.empty for p in parameters)
            assert defaults == len(node.args.defaults), node.name


def test_the_engine_takes_no_other_callables() -> None:
    engine = runtime.engine()
    for call in (
        lambda: engine.clear_decisions(print),
        lambda: engine.clear_waiting(print),
        lambda: engine.wait(print, b"key", 1.0),
        lambda: engine.waiting_seconds(print, b"key"),
        lambda: engine.clear_uncaptured_decisions(print),
        lambda: engine.add_uncaptured_decision(print, [], 0),
    ):
        with pytest.raises(ValueError, match=r"that graphed_callable\(\) has made"):
            call()
