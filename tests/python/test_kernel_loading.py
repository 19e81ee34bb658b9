"""Kernels that are loaded by a thread: here, what it launches, on the CPU, and how it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pygraph.gpu import fingerprint
from pygraph.verify import distance, kernel_loading

CPU = torch.device("cpu")


class OnGpu(torch.Tensor):
    """Says so."""

    is_cuda = True  # type: ignore[assignment]


INPUT = torch.zeros(3).as_subclass(OnGpu)  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is loaded, in this order; no loader has been started before."""
    found: list[Any] = []
    monkeypatch.setattr(kernel_loading, "_loader", None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(kernel_loading, "fingerprint", lambda dtype, _: found.append(dtype))
    monkeypatch.setattr(kernel_loading, "compare", lambda dtype, _: found.append(("compare", dtype)))
    yield found
    kernel_loading.wait()


def test_what_verification_computes_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    called: set[str] = set()

    def note(module: Any, name: str) -> None:
        original = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)

    note(fingerprint, "_weighted")
    note(distance, "_pieces")
    note(distance, "_agrees")
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        kernel_loading.fingerprint(dtype, CPU)
        assert called == {"_weighted"}
    kernel_loading.compare(torch.int64, CPU)
    kernel_loading.compare(torch.float32, CPU)
    assert called == {"_weighted", "_pieces", "_agrees"}
    assert torch.equal(before, torch.get_rng_state())


def test_one_thread_loads_for_the_first_program(loaded: list[Any]) -> None:
    kernel_loading.begin([3, torch.zeros(2)])  # nothing on a GPU
    kernel_loading.begin([INPUT, 3, INPUT])
    kernel_loading.begin([INPUT])
    kernel_loading.wait()
    assert loaded == [torch.float32]


def test_comparisons_are_loaded_for_training(loaded: list[Any]) -> None:
    kernel_loading.begin([INPUT.clone().requires_grad_()])
    kernel_loading.wait()
    assert loaded == [torch.float32, ("compare", torch.float32)]


def test_a_call_waits_for_fingerprints_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(kernel_loading, "compare", lambda dtype, _: may_go_on.wait(10))
    kernel_loading.begin([INPUT.clone().requires_grad_()])
    kernel_loading.wait_for_fingerprints()
    assert kernel_loading._loader is not None and kernel_loading._loader.is_alive()
    may_go_on.set()
    kernel_loading.wait()
    assert not kernel_loading._loader.is_alive()


@pytest.mark.parametrize("fails", ["launches", "threads"])
def test_errors_are_dropped(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("none left")

    if fails == "threads":
        monkeypatch.setattr(threading.Thread, "start", fail)
    else:
        monkeypatch.setattr(torch.cuda, "Stream", fail)
    kernel_loading.begin([INPUT])
    kernel_loading.wait_for_fingerprints()
    kernel_loading.wait()


def test_nobody_waits_where_nothing_has_begun() -> None:
    kernel_loading.wait_for_fingerprints()
    kernel_loading.wait()
