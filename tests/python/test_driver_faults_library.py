"""The library that lets driver calls fail, in front of a driver whose functions all succeed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_DRIVER = """
static int succeed(void) { return 0; }
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* s) {
  *function = name[0] == 'c' && name[1] == 'u' ? (void*)succeed : 0;
  return 0;
}
"""

_SCRIPT = """
import ctypes, os, threading
from tests.gpu import faults

assert faults.install()
driver = ctypes.CDLL(os.environ["PYGRAPH_LIBCUDA"])

def find(name):
    function = ctypes.c_void_p()
    assert driver.cuGetProcAddress_v2(name.encode(), ctypes.byref(function), 12040, 0, None) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(function.value)

launch = find("cuStreamSynchronize")
other = find("cuEventDestroy")
assert "cuStreamSynchronize" in faults.names() and len(faults.names()) > 60
assert launch(None) == 0 and faults.calls("cuStreamSynchronize") == 1
faults.inject("cuStreamSynchronize", faults.INVALID_VALUE)
assert other(None) == 0
assert [launch(None) for _ in range(3)] == [1, 0, 0]
faults.inject("cuStreamSynchronize", call=3)
assert [launch(None) for _ in range(4)] == [0, 0, 2, 0]
faults.inject("cuStreamSynchronize")
faults.clear()
assert launch(None) == 0
assert faults.failures("cuStreamSynchronize") == 2 and faults.failures("cuEventDestroy") == 0

faults.inject("cuStreamSynchronize", call=500)
results = []
run = lambda: results.extend([launch(None) for _ in range(400)])
threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(results)[-2:] == [0, 2] and len(results) == 1600
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_one_call_fails_and_the_others_reach_the_driver(tmp_path: Path) -> None:
    source = tmp_path / "driver.c"
    source.write_text(_DRIVER)
    driver = str(tmp_path / "libcuda.so.1")
    subprocess.run(["c++", "-x", "c", "-shared", "-fPIC", str(source), "-o", driver], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environment.pop("PYGRAPH_LIBCUDA", None)
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, cwd=root, env=environment)
