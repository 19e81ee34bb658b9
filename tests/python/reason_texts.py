"""The texts in the sources of which the reason of an uncaptured call is made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What ends in GraphStats.reason, in the log, or in a report: calls, variables and functions.
_PYTHON_CALLS = {
    *("refuse", "deselect", "Attempt", "NotRelocatable", "PoolInUse", "OthersDraw", "ImportError"),
    *("VerificationError", "_refusing", "_gap", "Cut"),
    *("_refuse", "NotGraphable", "Unseen", "give_up"),
}
_PYTHON_NAMES = {"failure", "reason", "refusal"}
_PYTHON_FUNCTIONS = {
    *("describe_failure", "_describe", "_reason", "_note_uncapturable", "_saved_elsewhere"),
    *("unavailable_reason", "of_memory", "unfit_result", "_not_differentiable"),
    *("unfit_argument", "_new_parameter", "_own_container", "read_property"),
    *("_host_tensors", "_survivors", "describe_effects"),
    *("refusal", "_remedy", "advice"),
}
_PYTHON_FOLDERS = ("callables", "partition", "record", "report", "select", "verify")
_PYTHON_FILES = ("engine.py", "runtime.py")

_CPP_CALLS = re.compile(
    r"\b(?:NotRelocatable|MemoryGone|PlansDropped|DriverError|runtime_error|refuse|doubt|differ|unsupported)"
    r"\((?P<text>(?:\"(?:[^\"\\]|\\.)*\"|[^;\"])*)\)?;",
)
_CPP_NAMES = re.compile(r"\b(?:kDiffers\b[^=;]*|failure) =(?P<text>[^;]*);", re.DOTALL)
_CPP_LITERALS = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\s*"((?:[^"\\]|\\.)*)")?')
_COMMENT = re.compile(r"//[^\n]*")


def texts() -> dict[str, str]:
    """Each text, and the file that has it."""
    package = ROOT / "python" / "pygraph"
    found: dict[str, str] = {}
    python = [path for folder in _PYTHON_FOLDERS for path in sorted((package / folder).rglob("*.py"))]
    for path in [*python, *(package / name for name in _PYTHON_FILES)]:
        for text in _in_python(ast.parse(path.read_text("utf-8"))):
            found.setdefault(text, path.name)
    for folder in ("src", "bindings"):
        for path in sorted((ROOT / folder).rglob("*.cc")):
            if "simulator" not in path.parts and "torch_patches" not in path.parts:
                for text in _in_cpp(_COMMENT.sub("", path.read_text("utf-8"))):
                    found.setdefault(text, path.name)
    return {text: file for text, file in found.items() if re.search(r"[a-z]{2} [a-z]{2}", text)}


def _in_python(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _PYTHON_CALLS:
                for value in [*node.args, *(k.value for k in node.keywords if k.arg in _PYTHON_NAMES)]:
                    yield from _literals(value)
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in _PYTHON_NAMES for target in targets):
                yield from _literals(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in _PYTHON_FUNCTIONS:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from _literals(inner.value)


def _literals(value: ast.expr) -> Iterator[str]:
    """The constant parts of a text."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value.strip()
    elif isinstance(value, ast.JoinedStr):
        for part in value.values:
            yield from _literals(part)
    elif isinstance(value, ast.BinOp):
        yield from _literals(value.left)
        yield from _literals(value.right)
    elif isinstance(value, ast.IfExp):
        yield from _literals(value.body)
        yield from _literals(value.orelse)


def _in_cpp(source: str) -> Iterator[str]:
    for pattern in (_CPP_CALLS, _CPP_NAMES):
        for call in pattern.finditer(source):
            for first, second in _CPP_LITERALS.findall(call["text"]):
                yield (first + second).strip()
