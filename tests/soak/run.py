"""Soak: ten models in eight threads, for a million replays, in little memory, while the driver fails.

    python -m tests.soak.run                         on an H200: some 7 minutes
    python -m tests.soak.run --models 2 --threads 2 --seconds 30

First a subprocess runs the same load under plain Inductor: its results are the expected ones, and its
memory times --memory is what PyGraph gets. Then everything runs under PyGraph. It ends early, with all
its figures, where the process is asked to end (SIGTERM). Ends with code 1 if a result was wrong,
anything raised, or memory grew. Only one load draws random numbers: PyTorch lets no other thread draw
from the default generator while a program that draws is recorded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .load import differs
from .models import MODELS
from .threads import SHOWN, Soak, names_of_faults

# Growth that is allowed between the first thousand calls and the end, in MiB: allocations of
# different sizes fill segments in different ways, and Python's own heap is not given back.
_GROWTH_MIB = {"allocated": 8, "reserved": 64, "outside": 96, "resident": 256}


def _faults(wanted: bool) -> Any:
    """The module that lets the driver fail, installed; None where there is none."""
    if not wanted:
        return None
    try:
        module = importlib.import_module("tests.gpu.faults")
    except ImportError:
        return None
    return module if module.install() else None


def _measure_inductor(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.soak.run", "--reference", str(folder)]
    for name in ("models", "threads", "device", "reference_backend", "reference_seconds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    subprocess.run(command, check=True)
    found: dict[str, Any] = torch.load(folder / "reference.pt")
    return found


def _reference(args: argparse.Namespace) -> None:
    """In the subprocess."""
    soak = Soak(args, args.reference_backend)
    soak.run(args.reference_seconds, 0, None)
    if soak.exceptions:
        raise SystemExit(f"the reference raised: {dict(soak.exceptions)}")
    is_on_gpu = args.device.startswith("cuda")
    peak = torch.cuda.max_memory_reserved() if is_on_gpu else 0
    found = {"results": soak.results, "peak": peak, "wrong": dict(soak.wrong), "calls": soak.calls}
    torch.save(found, Path(args.reference) / "reference.pt")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The summary."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        reference = _measure_inductor(args, Path(folder))
    faults = _faults(args.faults and args.backend == "pygraph")
    if args.device.startswith("cuda"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory * reference["peak"] / total))
    soak = Soak(args, args.backend)
    signal.signal(signal.SIGTERM, lambda *_: soak.end_soon())
    soak.run(args.seconds, args.replays, faults)
    wrong = dict(soak.wrong)
    for name, results in reference["results"].items():
        text = differs(results, soak.results[name]) if name in soak.results else "not compiled"
        if text:
            wrong[f"{name}, beside Inductor: {text}"] = 1
    growth = {name: round(soak.last[name] - soak.first[name], 1) for name in soak.last}
    summary: dict[str, Any] = {
        "seconds": round(time.monotonic() - start, 1),
        "calls": soak.calls,
        "replays": soak.replays,
        "wrong": wrong,
        "exceptions": dict(soak.exceptions.most_common(SHOWN)),
        "reference_mib": round(reference["peak"] / 2**20, 1),
        "reference_wrong": reference["wrong"],
        "memory_mib_after_first_calls": soak.first,
        "memory_mib_at_end": soak.last,
        "growth_mib": growth,
        "growth_allowed_mib": _GROWTH_MIB,
        "faults": {name: faults.failures(name) for name in names_of_faults(faults)},
    }
    too_much = {name: g for name, g in growth.items() if g > _GROWTH_MIB[name]}
    summary["passed"] = not wrong and not soak.exceptions and not too_much
    if args.replays and soak.replays < args.replays:
        summary["note"] = f"the time was over before {args.replays} replays"
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600, help="after everything is compiled")
    parser.add_argument("--replays", type=int, default=1_000_000, help="0: until the time is over")
    parser.add_argument("--memory", type=float, default=1.1, help="of what Inductor takes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="pygraph")
    parser.add_argument("--reference-backend", default="inductor")
    parser.add_argument("--reference-seconds", type=float, default=10)
    parser.add_argument("--reference", default="", help="only measure plain Inductor, into this folder")
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    parser.add_argument("--output", default="build/soak.json")
    args = parser.parse_args()
    os.environ.setdefault("PYGRAPH_SELECT", "always")  # every graph is used, and counted
    torch.backends.cudnn.deterministic = True
    # PyTorch 2.11 to 2.15 move the code that a call has found to the front of a list which another
    # thread may be searching: that one misses its code, and compiles again (docs/footguns.md).
    torch._C._dynamo.eval_frame._set_lru_cache(False)
    if args.reference:
        _reference(args)
        return
    summary = run(args)
    text = json.dumps(summary, indent=1)
    print(text)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(text + "\n")
    raise SystemExit(0 if summary["passed"] else 1)


if __name__ == "__main__":
    main()
