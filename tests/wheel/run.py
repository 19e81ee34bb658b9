"""Installs a wheel beside each release of PyTorch that it is for: ``make test-wheel``.

With ``--site 2.15=FOLDER:FOLDER``, PyTorch comes from those folders of packages; else it is installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_CHECK = Path(__file__).with_name("check.py")


def releases(wheel: Path) -> list[str]:
    """That the wheel has an engine for, by its files: _engine_2_15.*.so."""
    names = [name.rpartition("/")[2] for name in zipfile.ZipFile(wheel).namelist()]
    stems = [name.partition(".")[0] for name in names if name.startswith("_engine_")]
    return sorted(stem.removeprefix("_engine_").replace("_", ".") for stem in stems)


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def try_beside(release: str, wheel: Path, site: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        if site is None:
            run(python, "-m", "pip", "install", "--quiet", f"torch=={release}.*", "numpy", wheel)
        else:
            run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
            (packages,) = Path(folder).glob("lib/python*/site-packages")
            (packages / "torch_of_another_folder.pth").write_text(site.replace(os.pathsep, "\n"))
        run(python, _CHECK, release)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/wheel/run.py")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--site", action="append", default=[], help="RELEASE=FOLDERS")
    arguments = parser.parse_args()
    sites = dict(site.split("=", 1) for site in arguments.site)
    found = releases(arguments.wheel)
    for release in found:
        try_beside(release, arguments.wheel.resolve(), sites.get(release))
        print(f"PyTorch {release}: passed", flush=True)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
