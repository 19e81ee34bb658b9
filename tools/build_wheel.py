"""Builds a wheel with one engine per supported release of PyTorch: ``make wheel``.

Of each release, the headers and the libraries to link with come from its wheel, which is downloaded
without its dependencies. No CUDA toolkit is needed.

The wheel runs where PyTorch's wheels run, on systems with glibc 2.28 (tag manylinux_2_28), also if it
is built on a newer one: bindings/old_glibc.h asks for old versions of glibc's functions. The versions
that the built engines need are checked; where one is newer than such a system's, there is no wheel.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_UNPACKED = _ROOT / "build" / "torch"
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")

_PLATFORM = "manylinux_2_28_x86_64"
# The newest symbol versions that such a system has (auditwheel's table of policies).
_NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


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


def too_new(library: Path) -> list[str]:
    """The symbols of a library with versions that are newer than the platform's."""
    listing = subprocess.run(
        ["objdump", "--dynamic-syms", str(library)], check=True, capture_output=True, text=True
    ).stdout
    found = []
    for name, version, symbol in re.findall(r"\((\w+?)_([0-9.]+)\)\s+(\S+)", listing):
        number = tuple(int(part) for part in version.split("."))
        if name in _NEWEST and number > _NEWEST[name]:
            found.append(f"{symbol} ({name}_{version})")
    return found


def set_platform(wheel: Path) -> Path:
    """Gives a wheel the platform's tag. Raises RuntimeError where its engines need a newer system."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        engines = [name for name in archive.namelist() if name.endswith(".so")]
        for name in engines:
            symbols = too_new(Path(archive.extract(name, folder)))
            if symbols:
                raise RuntimeError(f"{name} is no {_PLATFORM}: it needs {', '.join(symbols)}")
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", _PLATFORM]
    done = subprocess.run([*command, str(wheel)], check=True, stdout=subprocess.PIPE, text=True)
    return wheel.with_name(done.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/build_wheel.py")
    parser.add_argument("--out", default="dist", help="folder for the wheel")
    parser.add_argument(
        "--torch", nargs="*", type=Path, help="folders of PyTorch, instead of downloads"
    )
    arguments = parser.parse_args()
    folders = arguments.torch or [unpacked(release) for release in releases()]
    define = ";".join(str(folder.resolve()) for folder in folders)
    settings = (
        f"cmake.define.PYGRAPH_TORCH_DIRS={define}",
        "cmake.define.PYGRAPH_OLD_GLIBC=ON",
        "build-dir=build/{wheel_tag}-all",
    )
    options = [option for setting in settings for option in ("-C", setting)]
    with tempfile.TemporaryDirectory() as folder:
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, *options, str(_ROOT))
        (built,) = Path(folder).glob("*.whl")
        wheel = set_platform(built)
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        finished = Path(shutil.move(wheel, out / wheel.name))
    print(f"{finished}: {finished.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
