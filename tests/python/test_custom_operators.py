"""Operators of torch.library.custom_op are reported while a recording is made, in all releases."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pygraph.record import custom_operators

from .contexts import during


@torch.library.custom_op("pygraph_test::reported", mutates_args=())
def _reported(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


X = torch.ones(3)


def _names() -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ops.pygraph_test.reported.default(X)
    return [event.name for event in found.events() or ()]


def _is_direct() -> bool:
    operator = torch.ops.pygraph_test.reported.default
    return bool(getattr(operator, "_pyobj_dispatcher", None))


def test_an_operator_is_reported_in_the_context_and_works_as_before_after_it() -> None:
    before = _is_direct()
    with during(custom_operators.report_all):
        assert "pygraph_test::reported" in _names()
    assert _is_direct() == before
    assert torch.equal(torch.ops.pygraph_test.reported.default(X), X.sin())


def test_every_operator_that_is_called_directly_is_found() -> None:
    found = set(custom_operators._called_directly())
    namespaces = [n for n in vars(torch.ops).values() if isinstance(n, torch._ops._OpNamespace)]
    packets = [p for n in namespaces for p in vars(n).values()]
    expected = {
        o
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for o in vars(packet).values()
        if getattr(o, "_pyobj_dispatcher", None) is not None
    }
    assert found == expected
    assert (torch.ops.pygraph_test.reported.default in found) == _is_direct()


def test_an_exception_ends_the_context() -> None:
    before = _is_direct()
    with pytest.raises(ValueError, match="inside"), during(custom_operators.report_all):
        raise ValueError("inside")
    assert _is_direct() == before


def test_contexts_of_several_threads_overlap() -> None:
    before = _is_direct()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with during(custom_operators.report_all):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    with during(custom_operators.report_all):
        assert not _is_direct()
    assert not _is_direct(), "the other thread still records"
    leave.set()
    thread.join()
    assert _is_direct() == before
