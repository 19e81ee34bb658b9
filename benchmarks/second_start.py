"""The time until a process's tenth call, for a first start and with filled caches on disk.

    python -m benchmarks.second_start [--starts 3] [--variants pygraph "inductor+graphs"]

A BERT of 12 layers with random weights, in inference and in training. Each start is a process of its
own with the cache folder of its variant, which is empty for the first one. The first one makes a
hundred calls, so that what is decided by measurements is on disk. The time is measured from
before ``torch.compile`` to the end of the tenth call on the GPU, without imports and the construction
of the model. The later starts of the variants alternate. Prints each time as it is measured, and when
Python collected all of its garbage meanwhile, then medians, smallest and largest times, and the
distance of the results from those of the first start.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

VARIANTS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "inductor+graphs": {"mode": "reduce-overhead"},
    "pygraph": {"backend": "pygraph", "options": {"pygraph.warm_start": True}},
    "pygraph, no warm start": {"backend": "pygraph", "options": {"pygraph.warm_start": False}},
}
_CALLS, _FIRST_CALLS = 10, 100


class Collections:
    """When each full collection of Python's garbage began and ended, in seconds since ``begin``."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.found: list[list[float]] = []
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != 2:
            return
        now = time.perf_counter() - self.begin
        if phase == "start":
            self.found.append([now, now])
        elif self.found:
            self.found[-1][1] = now


def start(variant: str, mode: str, results: Path) -> dict[str, Any]:
    """In a process of its own. results: a file with the first start's, made where it is missing."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model: Any = transformers.BertModel(config)
    model = model.cuda().train(mode == "training")
    words = torch.randint(0, config.vocab_size, (8, 128), device="cuda")
    torch.cuda.synchronize()
    collections = Collections()
    compiled: Any = torch.compile(model, **VARIANTS[variant])
    seconds = []
    with torch.set_grad_enabled(mode == "training"):
        for _ in range(_CALLS if results.exists() else _FIRST_CALLS):
            model.zero_grad(set_to_none=True)
            output = compiled(input_ids=words).last_hidden_state
            if mode == "training":
                output.square().mean().backward()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - collections.begin)
    found = [output.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    if not results.exists():
        torch.save(found, results)
    expected = torch.load(results)
    difference = max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in zip(found, expected, strict=True)
    )
    from torch._dynamo.utils import counters

    return {
        "until_first": seconds[0],
        "until_second": seconds[1],
        "until_tenth": seconds[_CALLS - 1],
        "collections": [of for of in collections.found if of[0] < seconds[_CALLS - 1]],
        "difference": difference,
        "loaded": counters["aot_autograd"]["autograd_cache_hit"],
        "compiled": counters["aot_autograd"]["autograd_cache_miss"],
    }


def _in_a_process(variant: str, mode: str, folder: Path) -> dict[str, Any]:
    cache = folder / variant.replace(" ", "_") / mode
    cache.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.second_start",
            "--worker",
            variant,
            mode,
            str(cache / "results.pt"),
        ],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    until = "; ".join(f"{k} {found[f'until_{k}']:.2f}" for k in ("first", "second", "tenth"))
    collected = ", ".join(f"{a:.2f} to {b:.2f}" for a, b in found["collections"])
    print(f"  {mode}, {variant}: {until}; garbage {collected or 'none'} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3, help="after the first one")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--modes", nargs="+", default=["inference", "training"])
    parser.add_argument(
        "--worker", nargs=3, metavar=("VARIANT", "MODE", "FILE"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.worker:
        variant, mode, path = args.worker
        print(json.dumps(start(variant, mode, Path(path))))
        return
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.modes:
            first = {v: _in_a_process(v, mode, Path(folder)) for v in args.variants}
            later: dict[str, list[dict[str, Any]]] = {v: [] for v in args.variants}
            for _ in range(args.starts):
                for variant in args.variants:
                    later[variant].append(_in_a_process(variant, mode, Path(folder)))
            for variant, rows in later.items():
                tenth = [row["until_tenth"] for row in rows]
                print(
                    f"{mode:<10} {variant:<24} first start {first[variant]['until_tenth']:6.1f} s,"
                    f" later {statistics.median(tenth):5.2f} s ({min(tenth):.2f} to {max(tenth):.2f}),"
                    f" until the first call {statistics.median(r['until_first'] for r in rows):5.2f} s;"
                    f" programs loaded {rows[0]['loaded']}, compiled {rows[0]['compiled']};"
                    f" largest difference {max(r['difference'] for r in rows):.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
