"""Compares the table of patches with the installed PyTorch: ``python -m pygraph.torch_patches.check``.

For each patch it prints "match", "changed" or "gone", and the dotted names that are not as known; where
the table does not have the installed release, in comparison with the newest release that it has. With
``--digests`` it prints the entry of each patch for the installed release, for the table. It ends with
status 0 if all match a release of that name, else with 1. It needs no GPU, and does not load the
engine.
"""

from __future__ import annotations

import argparse
import sys

import torch

from pygraph.torch_patches import sources
from pygraph.torch_patches.table import PATCHES, Patch


def newest_known(patch: Patch) -> str:
    """The installed release if the patch is known to fit it, else the newest that it does fit."""
    if sources.release() in patch.known:
        return sources.release()
    return max(patch.known, key=lambda release: [int(part) for part in release.split(".")])


def check(patch: Patch) -> bool:
    """Prints how the installed PyTorch compares; whether the patch is known to fit it."""
    known = newest_known(patch)
    found = sources.differences(patch, known)
    kinds = {difference.kind for difference in found}
    result = "gone" if "gone" in kinds else "changed" if kinds else "match"
    note = "" if known == sources.release() else f" (compared with {known})"
    print(f"{patch.name:<18} {result}{note}")
    for difference in found:
        print(f"    {difference}")
    return not found and not note


def print_digests(patch: Patch) -> None:
    digests = ", ".join(f'"{sources.digest(name)}"' for name in patch.names)
    print(f'{patch.name}: "{sources.release()}": ({digests}{"," if len(patch.names) == 1 else ""})')


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pygraph.torch_patches.check")
    parser.add_argument("--digests", action="store_true", help="print entries for the table instead")
    arguments = parser.parse_args()
    if arguments.digests:
        for patch in PATCHES:
            print_digests(patch)
        return 0
    unknown = not all(sources.release() in patch.known for patch in PATCHES)
    print(f"PyTorch {torch.__version__}" + (", not in the table for all patches" if unknown else ""))
    results = [check(patch) for patch in PATCHES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
