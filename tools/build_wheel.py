"""Builds a wheel with one engine per supported release of PyTorch: ``make wheel``.

Of each release, the headers and the libraries to link with come from its wheel, which is downloaded
without its dependencies. No CUDA toolkit is needed.
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_UNPACKED = _ROOT / "build" / "torch"
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")


def releases() -> tuple[str, ...]:
    """That PyGraph supports."""
    table = runpy.run_path(str(_ROOT / "python/pygraph/torch_patches/table.py"), run_name="table")
    found: tuple[str, ...] = table["RELEASES"]
    return found


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def unpacked(release: str) -> Path:
    """The folder `torch` of a release's newest wheel, as far as it is needed here."""
    folder = _UNPACKED / release
    if not (folder / "ready").exists():
        pip("download", "--no-deps", "--only-binary", ":all:", "-d", str(folder), f"torch=={release}.*")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            needed = tuple(f"torch/lib/{library}" for library in _LIBRARIES)
            names = [n for n in archive.namelist() if n.startswith("torch/include/") or n in needed]
            archive.extractall(folder, names)
        wheel.unlink()
        (folder / "ready").touch()
    return folder / "torch"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/build_wheel.py")
    parser.add_argument("--out", default="dist", help="folder for the wheel")
    parser.add_argument(
        "--torch", nargs="*", type=Path, help="folders of PyTorch, instead of downloads"
    )
    arguments = parser.parse_args()
    folders = arguments.torch or [unpacked(release) for release in releases()]
    define = ";".join(str(folder.resolve()) for folder in folders)
    settings = (f"cmake.define.PYGRAPH_TORCH_DIRS={define}", "build-dir=build/{wheel_tag}-all")
    options = [option for setting in settings for option in ("-C", setting)]
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", arguments.out, *options, str(_ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
