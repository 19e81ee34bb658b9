"""Worker processes, whose crashes and hangs are their program's and not the fuzzer's."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

UNFINISHED = "unfinished"  # the verdict of a program whose run was over before it was
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
        self._is_shut = False
        self.starts = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, request: dict[str, Any], seconds: float, until: float = math.inf) -> dict[str, Any]:
        """The reply; ``verdict`` is "crashed" or "hung" where there was none, and the worker ended.
        Then ``series`` tells which series of calls it was in. UNFINISHED, and the worker ended, if the
        time ``until`` (of time.monotonic) came before."""
        unfinished = {"verdict": UNFINISHED, "detail": []}
        if self._is_shut:
            return unfinished
        try:
            if self._process is None:
                self._start(until)
            assert self._process is not None and self._process.stdin is not None
            line = json.dumps({**request, "seconds": seconds}) + "\n"
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
            reply = self._reply(seconds, until)
        except BrokenPipeError:
            reply = None
        except TimeoutError:
            self.stop()
            return unfinished
        if reply is not None and reply.get("verdict") not in ("crashed", "hung"):
            return reply
        code = self._end()
        if self._is_shut:
            return unfinished
        if reply is None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            reply = {"verdict": "crashed", "detail": [f"the worker ended with {how}", *self.log_tail()]}
        return {**reply, "series": self._series}

    def _reply(self, seconds: float, until: float) -> dict[str, Any] | None:
        """None if the worker has ended. Raises TimeoutError if it is late already."""
        end = time.monotonic() + seconds
        while True:
            line = self._line(min(end, until))
            if line is None:
                return None
            if not line and end > until:
                raise TimeoutError
            if not line:
                detail = [f"no answer in {seconds:.0f} s", *self.log_tail()]
                self.stop()
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

    def _start(self, until: float) -> None:
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
        if self._is_shut:  # meanwhile
            self._process.kill()
        if (self._reply(_START_SECONDS, until) or {}).get("ready") is not True and not self._is_shut:
            self._end()
            raise RuntimeError("a worker does not start: " + "\n".join(self.log_tail()))

    def _end(self, patience: float = 5.0) -> int:
        """The exit code. patience: seconds for the process to go. One that the kernel does not let go
        is left behind."""
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            # One that has closed its output is about to end by itself, and its code tells how.
            code = process.wait(timeout=patience if self._pending == b"" else 0.1)
        except subprocess.TimeoutExpired:
            process.kill()
            code = -signal.SIGKILL
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return code

    def stop(self, patience: float = 5.0) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._pending = b""
            self._end(patience)

    def shut(self) -> None:
        """Kills the process, also while another thread waits for a reply, which is UNFINISHED then, as
        all later ones are. Does not wait for the end of the process."""
        self._is_shut = True
        process = self._process
        if process is not None:
            process.kill()

    def log_tail(self, lines: int = 25) -> list[str]:
        """The end of what it has printed."""
        text = self._log_path.read_text(errors="replace") if self._log_path.exists() else ""
        return text.splitlines()[-lines:]
