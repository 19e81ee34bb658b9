"""compute-sanitizer over the engine's GPU tests and a small model.

    python -m tests.sanitizer.run [--only memcheck] [--seconds 300]

memcheck: accesses outside of memory. PyGraph's stand-in pages are mapped only while a graph is
verified, so that an access to one later is an error here, too. Calls of the driver that PyGraph makes
to see whether they fail must not count (--report-api-errors no).
racecheck: shared memory only; PyGraph's one kernel and Triton's.
initcheck: reads of memory that nobody wrote. PyTorch's allocator hands out old memory again, which
counts as written, and PyGraph's poison writes what it fills; so it sees less than it does elsewhere.
Libraries (cuBLAS, cuDNN) read padding that does not matter: errors in their kernels are counted apart.
A run that takes longer than --seconds counts as not finished, which is not a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck")
# Without the long one, and tests that look at free memory, of which the sanitizer takes some.
_ENGINE_FILTER = "-RandomProgramTest.*:*HugeAllocations*:*MemoryIsTakenAndGivenBack*"
_LIBRARIES = re.compile(r"cublas|cudnn|cutlass|gemm|nvjet|sm\d\d_x", re.IGNORECASE)
_ERROR = re.compile(r"=========\s+(Invalid|Uninitialized|Error|Race|Hazard|Warning: Race|Program hit)")
_KERNEL = re.compile(r"=========\s+at (.*)")


def programs(engine: Path) -> dict[str, list[str]]:
    """By name."""
    model = [sys.executable, "-m", "tests.sanitizer.small_model"]
    return {
        "engine": [str(engine), f"--gtest_filter={_ENGINE_FILTER}", "--gtest_brief=1"],
        "inference": [*model, "inference"],
        "training": [*model, "training"],
    }


def count_errors(text: str) -> tuple[int, int]:
    """Errors in kernels of PyGraph's, of Triton's and of PyTorch's; and in libraries' kernels."""
    own = libraries = 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not _ERROR.match(line):
            continue
        kernel = next((m[1] for later in lines[number : number + 4] if (m := _KERNEL.match(later))), "")
        if _LIBRARIES.search(kernel):
            libraries += 1
        else:
            own += 1
    return own, libraries


def run_one(tool: str, command: list[str], log: Path, seconds: float) -> tuple[str, int, bool]:
    """A summary, errors outside of libraries, and whether the program itself ended well."""
    options = ["--tool", tool, "--target-processes", "all", "--print-limit", "200"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]
    environment = {**os.environ, "PYGRAPH_TEST_DRIVER": "cuda", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    start = time.monotonic()
    with open(log, "w") as output:
        try:
            code = subprocess.run(
                ["compute-sanitizer", *options, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not finished in {seconds:.0f} s", 0, True
    own, libraries = count_errors(log.read_text(errors="replace"))
    text = f"{own} errors, {libraries} in libraries, exit code {code}, {time.monotonic() - start:.0f} s"
    return text, own, code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, default=Path("build/engine/tests/cpp/engine_tests"))
    parser.add_argument("--folder", type=Path, default=Path("build/sanitizer"))
    parser.add_argument("--only", choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer is not installed")
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for tool in [args.only] if args.only else TOOLS:
        for name, command in programs(args.engine).items():
            log = args.folder / f"{tool}-{name}.log"
            text, errors, is_well = run_one(tool, command, log, args.seconds)
            failed |= errors > 0 or not is_well
            print(f"{tool:10} {name:10} {text}; {log}", flush=True)
    print("sanitizer: " + ("FAILED" if failed else "passed"))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
