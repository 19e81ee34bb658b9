"""Compares the table of patches with the installed PyTorch: ``python -m pygraph.torch_patches.check``.

For each patch it prints "match", "changed" or "gone", and the dotted names that are not as known; where
the patch is not known to fit the installed release, in comparison with the newest release that it fits;
or "left off", and why. With ``--digests`` it prints the digests of the installed release that differ
from the known ones, for :mod:`.digests`. It ends with status 0 if all match a release of that name or
are left off there, else with 1. It needs no GPU, and does not load the engine.
"""

from __future__ import annotations

import argparse
import sys

import torch

from pygraph.torch_patches import sources
from pygraph.torch_patches.digests import DIGESTS
from pygraph.torch_patches.table import PATCHES, RELEASES, REQUIRED, Patch


def check(patch: Patch) -> bool:
    """Prints how the installed PyTorch differs from the table. Returns True if the patch matches the
    installed release, or is left off there."""
    if sources.release() in patch.left_off:
        print(f"{patch.name:<18} left off: {sources.why_not(patch)}")
        return True
    # Where the patch is not known to fit the installed release: the newest that it does fit.
    known = sources.release() if sources.release() in patch.releases else patch.releases[-1]
    found = sources.differences(patch, known)
    kinds = {difference.kind for difference in found}
    result = "gone" if "gone" in kinds else "changed" if kinds else "match"
    note = "" if known == sources.release() else f" (compared with {known})"
    print(f"{patch.name:<18} {result}{note}")
    for difference in found:
        print(f"    {difference}")
    return not found and not note


def print_digests() -> None:
    """Prints digests that have changed since the newest known release."""
    for name in DIGESTS:
        actual = sources.digest(name)
        if actual != sources.known_digest(name, sources.release()):
            print(f'"{name}": "{sources.release()}": "{actual}"')


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pygraph.torch_patches.check")
    parser.add_argument("--digests", action="store_true", help="print digests that differ instead")
    arguments = parser.parse_args()
    if arguments.digests:
        print_digests()
        return 0
    unknown = sources.release() not in RELEASES
    print(f"PyTorch {torch.__version__}" + (", not in the table" if unknown else ""))
    results = [check(patch) for patch in (*PATCHES, *REQUIRED)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
