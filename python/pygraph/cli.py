"""The command line: ``pygraph explain script.py``."""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pygraph", description="CUDA graphs for PyTorch programs.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "explain",
        help="run a script and report what ran in graphs, and why the rest did not",
        description="Runs the script with torch.compile using PyGraph, then reports.",
    )
    command.add_argument("--html", action="store_true", help="write a page and open it in a browser")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--output", type=Path, help="where --html writes (default: SCRIPT.html)")
    command.add_argument("script", type=Path)
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    return _explain(parser.parse_args(argv))


def _explain(options: argparse.Namespace) -> int:
    from pygraph.observations import observing
    from pygraph.report.script import report_on

    if not options.script.is_file():
        print(f"pygraph explain: there is no file {options.script}", file=sys.stderr)
        return 2
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.parent))
    torch.compile = _compile_with_pygraph(torch.compile)
    status = 0
    namespace: dict[str, Any] = {}  # keeps the script's compiled programs alive
    with observing() as observation:
        try:
            namespace = runpy.run_path(str(options.script), run_name="__main__")
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    report = report_on(options.script.name, observation)
    del namespace
    print(report.to_json() if options.json else report)
    if options.html:
        path = options.output or options.script.with_suffix(".html")
        report.save(path)
        print(f"written to {path}", file=sys.stderr)
        webbrowser.open(path.resolve().as_uri())
    return status


def _compile_with_pygraph(compile_: Any) -> Any:
    """torch.compile with PyGraph in the place of Inductor; other backends stay what they are."""

    @functools.wraps(compile_)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend", "inductor") == "inductor":
            kwargs["backend"] = "pygraph"
            if kwargs.get("mode") == "reduce-overhead":
                kwargs["mode"] = None
        return compile_(*args, **kwargs)

    return wrapper
