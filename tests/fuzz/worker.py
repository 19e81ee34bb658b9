"""One process that checks programs: a line of JSON in, a line of JSON out.

    {"seed": 7}, {"seed": 7, "level": "compiled"} or {"program": {...}}  ->  the Outcome

It ends with code 86 when the process cannot use the GPU any more, after it has said so.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import sys
import traceback
import warnings
from typing import Any

LOST = 86


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fault", default="")
    args = parser.parse_args()
    # Replies go where stdout was; what libraries print goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    warnings.filterwarnings("ignore")
    import torch

    from .check import Outcome, check, run_uncaptured
    from .program import UNCAPTURED
    from .series import FatalError

    torch.set_num_threads(1)
    device = "cuda:0" if args.device == "cuda" else args.device
    wrap = _wrap(args.fault, device)

    def say_series(name: str) -> None:
        print(json.dumps({"series": name}), file=replies, flush=True)

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds = request.get("seconds", 60)
        faulthandler.dump_traceback_later(max(1, seconds - 2))  # into the log, before the parent acts
        try:
            program = _program(request)
            if "uncaptured_runs" in request:
                say_series(UNCAPTURED)
                for _ in range(request["uncaptured_runs"]):
                    run_uncaptured(program, device)
                outcome = Outcome(program.seed, program.level, "equal")
            else:
                outcome = check(program, device, wrap, say_series)
                if outcome.leaked:  # what is made once in a process is not made again
                    outcome.leaked = check(program, device, wrap, say_series).leaked
            reply: dict[str, Any] = dataclasses.asdict(outcome)
        except FatalError as error:
            reply = {"verdict": "crashed", "detail": str(error).splitlines()}
            print(json.dumps(reply), file=replies, flush=True)
            os._exit(LOST)
        except Exception as error:
            traceback.print_exc()
            if _is_lost(device):
                reply = {"verdict": "crashed", "detail": [f"{type(error).__name__}: {error}"[:300]]}
                print(json.dumps(reply), file=replies, flush=True)
                os._exit(LOST)
            text = traceback.format_exc().strip().splitlines()[-12:]
            reply = {"verdict": "harness", "detail": [f"{type(error).__name__}: {error}"[:300], *text]}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(reply), file=replies, flush=True)


def _is_lost(device: str) -> bool:
    import torch

    try:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _wrap(fault: str, device: str) -> Any:
    """What makes the graphed form of a partition function. Without a GPU, or with the fault "none",
    programs are compared with themselves: that checks the fuzzer and shows what PyTorch does alone."""
    from . import faulty, partition_level

    if fault == "none" or not (fault or device.startswith("cuda")):
        return partition_level.direct
    return faulty.wrap(fault) if fault else partition_level.graphed


def _program(request: dict[str, Any]) -> Any:
    from .generate import generate
    from .program import from_json

    if "program" in request:
        return from_json(request["program"])
    return generate(request["seed"], request.get("level", ""), request.get("mode", ""))


if __name__ == "__main__":
    main()
