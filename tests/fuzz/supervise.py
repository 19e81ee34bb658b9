"""Worker processes, whose crashes and hangs are their program's and not the fuzzer's."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_START_SECONDS = 180.0  # imports of many processes at a time


class Worker:
    """One worker process, started anew where it has ended."""

    def __init__(self, number: int, device: str, folder: Path, fault: str = "", gpus: int = 1) -> None:
        self._number, self._device, self._fault = number, device, fault
        self._log_path = folder / f"worker-{number}.log"
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "PYGRAPH_SELECT": "always",
        }
        if gpus > 1:
            self._environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._series = ""
        self.starts = 0

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The reply; ``verdict`` is "crashed" or "hung" where there was none, and the worker ended.
        Then ``series`` tells which series of calls it was in."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            line = json.dumps({**request, "seconds": seconds}) + "\n"
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
            reply = self._reply(seconds)
        except BrokenPipeError:
            reply = None
        if reply is not None and reply.get("verdict") not in ("crashed", "hung"):
            return reply
        code = self._end()
        if reply is None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            reply = {"verdict": "crashed", "detail": [f"the worker ended with {how}", *self.log_tail()]}
        return {**reply, "series": self._series}

    def _reply(self, seconds: float) -> dict[str, Any] | None:
        """None if the worker has ended."""
        end = time.monotonic() + seconds
        while True:
            line = self._line(end)
            if line is None:
                return None
            if not line:
                detail = [f"no answer in {seconds:.0f} s", *self.log_tail()]
                self._end()
                return {"verdict": "hung", "detail": detail}
            reply: dict[str, Any] = json.loads(line)
            if "series" not in reply:
                return reply
            self._series = reply["series"]

    def _line(self, end: float) -> bytes | None:
        """What the worker says next; empty if it is nothing until ``end``; None if it has ended."""
        assert self._process is not None and self._process.stdout is not None
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return b""
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                return None
            self._pending += piece
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker", "--device", self._device]
        command += ["--fault", self._fault] if self._fault else []
        self._pending = b""
        self.starts += 1
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )
        if (self._reply(_START_SECONDS) or {}).get("ready") is not True:
            self._end()
            raise RuntimeError("a worker does not start: " + "\n".join(self.log_tail()))

    def _end(self) -> int:
        """The exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            # One that has closed its output is about to end by itself, and its code tells how.
            code = process.wait(timeout=5 if self._pending == b"" else 0.1)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def log_tail(self, lines: int = 25) -> list[str]:
        """The end of what it has printed."""
        text = self._log_path.read_text(errors="replace") if self._log_path.exists() else ""
        return text.splitlines()[-lines:]
