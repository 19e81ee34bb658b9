"""What newer releases of PyTorch do at a compiled call, the engine does, too, or leaves to them."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import eval_frame

from tests.python.compiled_programs import Backend, OurBackend, X

pytestmark = pytest.mark.usefixtures("patched")

isolates = pytest.mark.skipif(
    not hasattr(eval_frame, "set_eval_frame_isolate_recompiles_id"), reason="from PyTorch 2.13 on"
)
runs_eagerly = pytest.mark.skipif(
    not hasattr(eval_frame, "_use_eager_on_nested_compile"), reason="from PyTorch 2.14 on"
)


def test_programs_that_must_be_one_graph(backend: Backend) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    is_ours = type(backend) is OurBackend and hasattr(eval_frame, "set_eval_frame_override")
    assert hasattr(compiled, "_pygraph_compiled_call") is is_ours
    for _ in range(3):
        assert torch.equal(compiled(X), X + 1)
    assert backend.graphs == 1


@isolates
def test_isolated_recompilations(backend: Backend) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    plain = torch.compile(function, backend=backend)
    assert torch.equal(plain(X), X + 1)
    isolated = torch.compile(function, backend=backend, isolate_recompiles=True)
    assert not hasattr(isolated, "_pygraph_compiled_call")

    @torch.compiler.disable
    def calls_plain(x: torch.Tensor) -> torch.Tensor:
        return plain(x)

    around = torch.compile(lambda x: calls_plain(x) * 2, backend=backend, isolate_recompiles=True)
    for _ in range(2):
        assert torch.equal(isolated(X), X + 1)
        assert torch.equal(around(X), (X + 1) * 2)
    assert eval_frame.set_eval_frame_isolate_recompiles_id(-1) == -1


@isolates
def test_dispatch_keys_are_as_before(backend: Backend) -> None:
    key = torch._C.DispatchKey.AutogradCPU

    @torch.compiler.disable
    def leaves_something(x: torch.Tensor) -> torch.Tensor:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
        return x

    compiled = torch.compile(lambda x: leaves_something(x + 1), backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(X), X + 1)
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


@runs_eagerly
def test_within_a_compilation_of_pytorchs_own(backend: Backend) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(X)
    with eval_frame._use_eager_on_nested_compile():
        assert torch.equal(compiled(X[None]), X[None] + 1)
        assert backend.graphs == 1
    compiled(X[None])
    assert backend.graphs == 2
