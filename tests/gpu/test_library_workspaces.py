"""Workspaces that PyTorch keeps for cuBLAS: what a trial frees of them, and what recordings use."""

from __future__ import annotations

import pytest
import torch
from torch.library import custom_op

from pygraph import runtime
from pygraph.gpu.load import side_stream

from .support import captured, compiled, randn, refusals

_SMALL = 1 << 20  # bytes; a workspace has 4 MiB at least


@custom_op("pygraph_test::differentiates", mutates_args=())
def differentiates(x: torch.Tensor) -> torch.Tensor:
    """Runs a backward of its own, in autograd's thread."""
    key = torch._C.DispatchKey.AutogradFunctionality
    was_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            w = x.detach().clone().requires_grad_()
            loss = (w @ w).sum()
            # A piece of memory for that thread's workspace: in a recording, it gets no new ones.
            torch.empty(1 << 28, dtype=torch.uint8, device=x.device)
            (gradient,) = torch.autograd.grad(loss, w)
        return gradient
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, was_excluded)


differentiates.register_fake(lambda x: torch.empty_like(x))


def _keeps_workspaces() -> bool:
    """PyTorch 2.15 allocates one for each product, unless TORCH_CUBLAS_WORKSPACE_CACHE=1 is set."""
    x = randn(512, 512)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    product = x @ x
    return torch.cuda.memory_allocated() - before > product.nbytes + _SMALL


@torch.no_grad()
def test_the_workspace_of_autograds_thread_is_not_freed() -> None:
    """That thread works for others, too: one of them may just be using it."""
    if not _keeps_workspaces():
        pytest.skip("this PyTorch keeps no workspaces between products")
    model = compiled(lambda x: differentiates(x) * 2)
    x = randn(512, 512)
    with torch.enable_grad():
        w = x.clone().requires_grad_()
        torch.autograd.grad((w @ w).sum(), w)
        for _ in range(6):
            model(x)
        loss = (w @ w).sum()  # a workspace of this thread's own
        before = torch.cuda.memory_allocated()
        (gradient,) = torch.autograd.grad(loss, w, retain_graph=True)
        assert torch.cuda.memory_allocated() - before <= gradient.nbytes + _SMALL
        runtime.engine().free_blas_workspaces()
        freed = before - torch.cuda.memory_allocated()
        assert freed > _SMALL, "no recording has used a workspace of this thread's"
        del gradient
        before = torch.cuda.memory_allocated()
        (gradient,) = torch.autograd.grad(loss, w)
        assert torch.cuda.memory_allocated() - before <= gradient.nbytes + _SMALL


@torch.no_grad()
def test_a_workspace_on_the_stream_of_recordings_is_set_aside() -> None:
    """As a destroyed stream leaves one, whose handle the stream of recordings has got."""
    x = randn(512, 512)
    with torch.cuda.stream(side_stream(0)):
        x @ x
    torch.cuda.synchronize()
    model = compiled(lambda x: torch.relu(x @ x) @ x)
    for _ in range(6):
        torch.testing.assert_close(model(x), torch.relu(x @ x) @ x)
    assert len(captured()) == 1 and refusals() == []
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(side_stream(0)):
        product = x @ x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= product.nbytes + _SMALL, "it is not there again"
