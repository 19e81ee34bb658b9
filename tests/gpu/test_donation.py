"""Tensors saved for a backward that runs once: their memory serves as workspace and for gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.gpu.clones import clone_shared_storages
from pygraph.gpu.fingerprint import forget
from pygraph.record.side_effects import Watch
from pygraph.verify import rehearsal
from pygraph.verify.compare import Comparison

from .support import assert_same, captured, compiled, randn, uncaptured


class Wide(nn.Module):
    """Saves some MiB per layer; weights are as large as activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x.square().mean()


class Narrow(nn.Module):
    """Saves 6 to 8 MiB per layer at 2048 rows; weights have 3 MiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        widths = [1024, 768] * 5
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _backward_graphs() -> list[object]:
    return [
        entry.graph
        for partition in list(runtime.partitions)
        if partition.info.is_backward
        for entry in partition.entries.values()
        if entry.graph is not None
    ]


def _gradients(
    model: Callable[..., torch.Tensor], module: nn.Module, inputs: list[torch.Tensor], **kwargs: bool
) -> list[list[torch.Tensor]]:
    results = []
    for x in inputs:
        module.zero_grad()
        loss = model(x)
        loss.backward(**kwargs)
        if kwargs:
            loss.backward()
        results.append([p.grad for p in module.parameters() if p.grad is not None])
    return results


def test_gradients_take_the_place_of_saved_tensors() -> None:
    module = Wide().cuda()
    inputs = [randn(1024, 1024) for _ in range(6)]
    model = compiled(module)
    with uncaptured():
        expected = _gradients(model, module, inputs)
    assert_same(_gradients(model, module, inputs), expected)
    (graph,) = _backward_graphs()
    assert graph.donated  # type: ignore[attr-defined]
    assert graph.donated_replays >= 4  # type: ignore[attr-defined]
    assert "takes the place of input" in graph.link_map()  # type: ignore[attr-defined]


def test_a_backward_is_verified_where_the_gpu_has_no_room_for_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was saved waits in host memory, and its memory is free meanwhile."""
    allocated: list[int] = []

    def clone(
        args: list[object], positions: list[int], device: torch.device | None = None
    ) -> list[object]:
        if positions and device is None:
            raise torch.OutOfMemoryError("no room")
        if positions:
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
        return clone_shared_storages(args, positions, device)

    module = Wide().cuda()
    inputs = [randn(1024, 1024) for _ in range(6)]
    model = compiled(module)
    with uncaptured():
        expected = _gradients(model, module, inputs)
    monkeypatch.setattr(rehearsal, "clone_shared_storages", clone)
    assert_same(_gradients(model, module, inputs), expected)
    (graph,) = _backward_graphs()
    assert graph.donated_replays >= 4  # type: ignore[attr-defined]
    to_the_host, back, *_ = allocated
    assert back <= to_the_host - (8 << 20)


def test_small_gradients_lie_side_by_side_in_a_large_saved_tensor() -> None:
    module = Narrow().cuda()
    inputs = [randn(2048, 1024) for _ in range(6)]
    model = compiled(module)
    with uncaptured():
        expected = _gradients(model, module, inputs)
    gradients = _gradients(model, module, inputs)
    assert_same(gradients, expected)
    (graph,) = _backward_graphs()
    assert graph.donated_replays >= 4  # type: ignore[attr-defined]
    large = [gradient for gradient in gradients[-1] if gradient.nbytes >= 2**20]
    storages = {gradient.untyped_storage().data_ptr() for gradient in large}
    assert len(storages) <= len(large) - 3
    assert max(gradient.untyped_storage().nbytes() for gradient in large) <= 8 * 2**20


class Attention(nn.Module):
    """Queries, keys and values are parts of one tensor of 12 MiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.ModuleList(nn.Linear(1024, 3 * 1024) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            q, k, v = layer(x).view(8, 128, 3, 16, 64).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x.square().mean()


def test_the_parts_of_one_saved_tensor_are_donated_together() -> None:
    module = Attention().cuda()
    inputs = [randn(8, 128, 1024) for _ in range(9)]
    model = compiled(module)
    with uncaptured():
        expected = _gradients(model, module, inputs)
    assert_same(_gradients(model, module, inputs), expected)
    (graph,) = _backward_graphs()
    link_map = graph.link_map()  # type: ignore[attr-defined]
    # A weight's gradient is as large as the tensor of which three parts were saved.
    assert link_map.count("takes the place of input") >= 2, link_map
    assert graph.donated_replays >= 4  # type: ignore[attr-defined]


@torch.inference_mode()  # where views do not keep the tensor that they were made of
def test_what_is_given_away() -> None:
    def positions(arguments: list[object]) -> list[list[int]]:
        return [sorted(tensors.positions) for tensors in runtime.engine().given_away(arguments)]

    def parts() -> list[object]:  # a function: assert keeps what it sees in between
        return list(randn(4, 8).chunk(2, dim=1))

    assert positions([randn(4), None, 3, randn(4)]) == [[0], [3]]
    kept = randn(4)
    assert positions([kept, randn(4)]) == [[1]]
    assert positions(parts()) == [[0, 1]]
    assert positions(parts()[::-1]) == [[0, 1]]
    assert positions(parts()[:1]) == [[0]]
    assert positions(parts()[1:]) == []  # not the beginning of its storage
    base = randn(4, 8)
    assert positions(list(base.chunk(2, dim=1))) == []
    assert positions([torch.zeros(4)]) == []  # on the CPU


def test_a_graph_is_verified_and_used_with_donated_memory() -> None:
    module = Wide().cuda()
    model = compiled(module)
    _gradients(model, module, [randn(1024, 1024) for _ in range(4)])
    (graph,) = _backward_graphs()
    assert graph.replays == graph.donated_replays >= 2  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_cache")
def test_calls_that_keep_what_was_saved_get_a_graph_of_their_own_if_they_go_on() -> None:
    module = Wide().cuda()
    model = compiled(module)
    x = randn(1024, 1024)

    def step() -> list[torch.Tensor]:
        module.zero_grad()
        loss = model(x)
        loss.backward(retain_graph=True)
        return [p.grad for p in module.parameters() if p.grad is not None]

    with torch._functorch.config.patch(donated_buffer=False):
        with uncaptured():
            expected = step()
        _gradients(model, module, [x] * 6)
        (graph,) = _backward_graphs()
        assert graph.donated  # type: ignore[attr-defined]
        before = graph.replays  # type: ignore[attr-defined]
        assert_same(step(), expected)
        assert graph.replays == before  # type: ignore[attr-defined]
        for _ in range(200):
            assert_same(step(), expected)
            graphs = _backward_graphs()
            if graphs and graphs[0] is not graph:
                break
        for _ in range(30):
            assert_same(step(), expected)
    (again,) = _backward_graphs()
    assert again is not graph
    assert not again.donated  # type: ignore[attr-defined]
    assert again.replays >= 10  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_cache")
def test_a_backward_that_runs_twice_keeps_what_was_saved() -> None:
    module = Wide().cuda()
    inputs = [randn(1024, 1024) for _ in range(6)]
    model = compiled(module)
    with torch._functorch.config.patch(donated_buffer=False):
        with uncaptured():
            expected = _gradients(model, module, inputs, retain_graph=True)
        assert_same(_gradients(model, module, inputs, retain_graph=True), expected)
    assert {row.name for row in captured()} >= {"forward", "backward"}


def test_peak_memory_of_training_is_about_the_uncaptured_one() -> None:
    module = Wide().cuda()
    inputs = [randn(4096, 1024) for _ in range(4)]
    model = compiled(module)

    def peak() -> int:
        _gradients(model, module, inputs)
        torch.cuda.reset_peak_memory_stats()
        for x in inputs:
            module.zero_grad()
            model(x).backward()
        return torch.cuda.max_memory_allocated()

    with uncaptured():
        expected = peak()
    assert peak() <= 1.15 * expected
    assert {row.name for row in captured()} >= {"forward", "backward"}


def test_watching_a_call_holds_nothing_that_it_frees() -> None:
    mib, count = 1 << 20, 8
    args = [randn(8 * mib) for _ in range(count)]  # of 32 MiB
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    watch = Watch(args, 0, [])
    results = [args.pop().add_(1) if len(args) == 3 else args.pop() * 2 for _ in range(count)]
    assert watch.mutated() == {2}
    assert len(results) == count
    assert torch.cuda.max_memory_allocated() - before < 2 * 32 * mib
    results[2].record_stream(torch.cuda.Stream())  # the allocator's memory again


def test_results_that_are_compared_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "is_scarce", lambda wanted: wanted > allocator.MUCH)
    results = [randn(16 << 20) for _ in range(2)]  # of 64 MiB
    before = torch.cuda.memory_allocated()
    comparison = Comparison(results)
    comparison.find_unwritten([t.clone() for t in results])
    for number in range(3):
        noisy = [t * (1 + 1e-6 * torch.rand_like(t)) for t in results]
        if number == 1:
            noisy[0][:100] *= -1
        comparison.add_run(noisy)
        del noisy
        forget()
        assert torch.cuda.memory_allocated() - before < 1 << 20
    comparison.add_replay(results)
    forget()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert comparison.mismatches() == []
    results[1][7] = 1000
    comparison.add_replay(results)
    assert [mismatch.position for mismatch in comparison.mismatches()] == [1]


def _solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_ex(a.tanh() + 8 * torch.eye(64, device="cuda"), b.sin())[0].square()


def _grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = (a.reshape(-1, 64)[:4096] * 0.1).bfloat16()
    w = (b.reshape(-1, 64, 64) * 0.1).bfloat16()
    ends = torch.tensor([512, 1024, 2048, 4096], device="cuda", dtype=torch.int32)
    return torch._grouped_mm(x.tanh(), w[:4].sin(), ends).float().square()


@pytest.mark.parametrize("function", [_solve, _grouped])
def test_operators_whose_kernels_hand_addresses_to_each_other(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """By arrays of pointers in device memory: what they were given is in use until their end."""
    model = compiled(lambda a, b: function(a, b).sum())
    for _ in range(5):
        leaves = [randn(64, 64, 64, requires_grad=True) for _ in range(2)]
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        model(*leaves).backward()
        function(*copies).sum().backward()
        for leaf, copy in zip(leaves, copies, strict=True):
            torch.testing.assert_close(leaf.grad, copy.grad, rtol=2e-2, atol=2e-2)
