"""Statements of pointwise operators, views, reductions, sorting, gathering and scattering."""

from __future__ import annotations

import torch

from .program import GENERATOR, SIZE, Statement
from .scope import Scope, operator

_UNARY = [
    "torch.sin({0})",
    "torch.cos({0})",
    "torch.tanh({0})",
    "torch.sigmoid({0})",
    "torch.relu({0})",
    "F.gelu({0})",
    "F.silu({0})",
    "{0}.clamp(-3, 3).exp()",
    "{0}.abs()",
    "{0}.abs().sqrt()",
    "-{0}",
    "{0}.clamp(-2, 2).square()",
    "torch.floor({0})",
    "torch.erf({0})",
    "torch.log1p({0}.abs())",
    "torch.rsqrt({0}.abs() + 1)",
    "F.softplus({0})",
    "F.leaky_relu({0}, 0.1)",
    "F.hardtanh({0})",
    "torch.clamp({0}, -1, 1)",
    "torch.nan_to_num({0}, 0.5, 1.0, -1.0)",
    "{0}.clone()",
    "{0}.contiguous()",
    "torch.frac({0})",
    "{0} * 1.0",
    "{0} + 0.0",
    "torch.sign({0})",
    "{0}.to(torch.float32)",
    "{0}.to(torch.float64)",
    "{0}.to(torch.bfloat16)",
    "{0}.clamp(-99, 99).half()",
    "{0}.clamp(-99, 99).to(torch.int32)",
    "{0}.clamp(-99, 99).long()",
    "{0} > 0",
    "{0}.isnan()",
    "{0}.to(torch.float16).float()",
]
_BINARY = [
    "{0} + {1}",
    "{0} - {1}",
    "{0}.clamp(-9, 9) * {1}.clamp(-9, 9)",
    "{0} / ({1}.abs() + 1)",
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
    "torch.atan2({0}, {1})",
    "torch.where({1} > 0, {0}, 0.5)",
    "torch.lerp({0}, {1}.to({0}.dtype), 0.25)",
    "torch.copysign({0}, {1})",
    "torch.add({0}, {1}, alpha=0.5)",
    "{0} < {1}",
    "torch.addcmul({0}, {1}.to({0}.dtype).clamp(-9, 9), {0}.clamp(-9, 9), value=0.1)",
    "torch.fmod({0}, {1}.abs() + 1)",
    "torch.hypot({0}.clamp(-9, 9), {1}.clamp(-9, 9))",
    "torch.stack([{0}, {1}.expand_as({0}).to({0}.dtype)])",
    "torch.cat([{0}, {1}.expand_as({0}).to({0}.dtype)])",
]
_IN_PLACE = [
    "{0}.add_({1})",
    "{0}.mul_({1}.clamp(-2, 2))",
    "{0}.copy_({1})",
    "{0}.sub_({1}, alpha=0.5)",
    "{0}.masked_fill_({1} > 1e9, 5)",
    "{0}.masked_fill_({1} > 0, 1)",
    "{0}.lerp_({1}.to({0}.dtype), 0.5)",
    "{0}.addcmul_({1}.to({0}.dtype), {1}.to({0}.dtype), value=0)",
]
_IN_PLACE_ALONE = [
    "{0}.add_(1)",
    "{0}.mul_(1)",
    "{0}.mul_(0.5)",
    "{0}.clamp_(-1, 1)",
    "{0}.fill_(0.25)",
    "{0}.zero_()",
    "{0}.relu_()",
    "{0}.sin_()",
    "{0}.copy_({0}.clone())",
    "{0}.neg_().neg_()",
    "{0}.tanh_()",
]
_VIEWS = [
    "{0}.t()",
    "{0}.transpose(0, 1)",
    "{0}[1:]",
    "{0}[:-1]",
    "{0}[::2]",
    "{0}[0]",
    "{0}.unsqueeze(0)",
    "{0}.flatten()",
    "{0}.narrow(0, 0, 1)",
    "{0}.unsqueeze(-1).expand(*{0}.shape, 3)",
    "{0}[..., 1:]",
    "{0}.reshape(-1)",
    "{0}.view(-1)",
    "{0}.diagonal()",
    "{0}.unfold(0, 2, 1)",
    "{0}.detach()",
    "{0}.squeeze()",
    "{0}[:0]",
    "{0}.movedim(0, -1)",
    # Within the storage: compiled code does not check that.
    "{0}.as_strided((2, 2), (1, 1)) if {0}.is_contiguous() and {0}.numel() > 2 else {0}.detach()",
    "{0}[..., ::3]",
    "{0}[None, ...]",
    "{0}[-1:]",
]
_COPIES = [
    "{0}.flip(0)",
    "torch.roll({0}, 1, 0)",
    "{0}.repeat(2, *[1] * ({0}.dim() - 1))",
    "torch.tril({0})",
    "torch.triu({0})",
    "{0}.repeat_interleave(2, 0)",
    "F.pad({0}, (1, 1))",
    "{0}.transpose(0, 1).contiguous()",
    "torch.rot90({0})",
    "{0}.new_zeros({0}.shape)",
    "torch.zeros_like({0})",
    "torch.full_like({0}, 0.5)",
    "torch.ones_like({0})",
    "torch.empty_like({0}).copy_({0})",
    "torch.empty({0}.shape, device=DEVICE).fill_(1.5)",
    "torch.arange({0}.shape[0], device=DEVICE).float()",
    "torch.eye({0}.shape[0], device=DEVICE)",
    "torch.linspace(0, 1, {0}.shape[-1], device=DEVICE)",
    "torch.diff({0})",
    "torch.meshgrid({0}[:, 0], {0}[0], indexing='ij')[1]",
]
_REDUCTIONS = [
    "{0}.sum()",
    "{0}.sum(0)",
    "{0}.mean(-1, keepdim=True)",
    "{0}.amax(-1)",
    "{0}.amin(0, keepdim=True)",
    "{0}.var(-1, correction=0)",
    "{0}.std(-1, correction=0)",
    "torch.linalg.vector_norm({0}, dim=-1)",
    "{0}.argmax(-1)",
    "({0} > 0).any()",
    "({0} > 0).all(0)",
    "torch.logsumexp({0}, -1)",
    "{0}.clamp(-1.1, 1.1).prod(-1)",
    "({0} > 0).sum(0)",
    "{0}.mean()",
    "torch.count_nonzero({0}, dim=0)",
    "{0}.norm()",
    "torch.aminmax({0}).max",
    "{0}.double().sum()",
    "{0}.sum((0, 1))",
]
_ORDERED = [
    "{0}.sort(-1).values",
    "{0}.sort(dim=0, descending=True, stable=True).indices",
    "{0}.topk(2, -1).values",
    "{0}.argsort(dim=-1, stable=True)",
    "{0}.topk(1, 0, largest=False).values",
    "{0}.cummax(-1).values",
    "{0}.kthvalue(1, -1).values",
    "torch.searchsorted({0}.flatten().sort().values, {0}.flatten())",
    "torch.bucketize({0}, torch.arange(-2, 3, device=DEVICE).to({0}.dtype))",
    "{0}.median(-1).values",
]
_SCANS = ["{0}.cumsum(-1)", "{0}.cumsum(0)", "{0}.clamp(-1.1, 1.1).cumprod(-1)", "{0}.logcumsumexp(-1)"]
_INDEX = "({1}.flatten().clamp(-99, 99) * 7).long().abs()"
_GATHERS = (
    "torch.gather({0}, -1, {0}.argsort(dim=-1, stable=True))"
    f"|{{0}}.index_select(0, {_INDEX} % {{0}}.shape[0])|{{0}}[{_INDEX} % {{0}}.shape[0]]"
    "|torch.take_along_dim({0}, {0}.argmax(-1, keepdim=True), -1)"
    f"|F.embedding({_INDEX} % {{0}}.shape[0], {{0}})"
    f"|F.embedding_bag(({_INDEX} % {{0}}.shape[0]).view(1, -1), {{0}}, mode='sum')"
    f"|torch.take({{0}}, {_INDEX} % {{0}}.numel())"
).split("|")
_SCATTERS = (
    "{0}.scatter(-1, {0}.argsort(dim=-1, stable=True), {0}.clone())"
    "|{0}.index_copy(0, torch.arange({0}.shape[0], device=DEVICE).flip(0), {0}.clone())"
    f"|{{0}}.index_put(({_INDEX} % {{0}}.shape[0],), {{0}}[0], accumulate=True)"
    "|torch.scatter({0}, 0, torch.zeros_like({0}[:1]).long(), 1.5)"
    "|torch.slice_scatter({0}, {0}[:1] * 0.5, 0, 0, 1)|torch.select_scatter({0}, {0}[0] * 2, 0, 0)"
).split("|")
_SCATTERS_IN_PLACE = (
    "{0}.index_fill_(0, torch.zeros(1, dtype=torch.long, device=DEVICE), 0.5)"
    f"|{{0}}.index_put_(({_INDEX} % {{0}}.shape[0],), {{1}}.sum().to({{0}}.dtype), accumulate=True)"
    "|{0}.scatter_(-1, {0}.argsort(dim=-1, stable=True), {0}.clone())|{0}[..., :1].zero_()"
    "|{0}[0].add_(1)|{0}.diagonal().fill_(1)"
).split("|")
_ATOMIC = (
    f"{{0}}.index_add(0, {_INDEX} % {{0}}.shape[0], "
    f"{{0}}[:1].expand({_INDEX}.numel(), *{{0}}.shape[1:]))"
    "|{0}.scatter_add(-1, torch.zeros_like({0}).long(), {0})"
    "|{0}.scatter_reduce(0, torch.zeros_like({0}).long(), {0}, 'mean')"
).split("|")
_WHOLE = [
    "{0} + 1",
    "{0} * 3",
    "{0} & 7",
    "{0} ^ 5",
    "{0} << 1",
    "torch.remainder({0}, 5)",
    "{0}.float()",
    "{0} > 2",
    "~{0}",
    "{0}.sum()",
    "{0}.cumsum(0)",
    "{0}.to(torch.int32)",
    "{0}.double() / 3",
    "torch.bitwise_not({0})",
    "torch.histc({0}.float(), 4, 0, 8)",
    "{0}.abs() % 4 == 1",
    "{0}.to(torch.uint8)",
    "{0}.flip(0)",
    "{0}.clone()",
]


@operator(6)
def unary(scope: Scope) -> Statement | None:
    x = scope.floating()
    return scope.result(scope.rng.choice(_UNARY), x) if x else None


@operator(6)
def binary(scope: Scope) -> Statement | None:
    x = scope.floating()
    y = scope.broadcastable(x) if x else None
    return scope.result(scope.rng.choice(_BINARY), x, y) if x and y else None


@operator(4)
def in_place(scope: Scope) -> Statement | None:
    x = scope.writable(torch.is_floating_point)
    y = scope.broadcastable(x) if x else None
    if not x or not y:
        return None
    if scope.rng.random() < 0.5:
        return Statement([], scope.rng.choice(_IN_PLACE_ALONE), [x], writes=[0])
    return Statement([], scope.rng.choice(_IN_PLACE), [x, y], writes=[0])


@operator(4)
def view(scope: Scope) -> Statement | None:
    x = scope.pick(lambda t: t.dim() > 0)
    return scope.result(scope.rng.choice(_VIEWS), x) if x else None


@operator(1)
def split(scope: Scope) -> Statement | None:
    x = scope.pick(lambda t: t.dim() > 0 and t.shape[-1] % 2 == 0 and t.numel() > 0)
    return scope.result("{0}.chunk(2, -1)", x, count=2) if x else None


@operator(2)
def copied(scope: Scope) -> Statement | None:
    x = scope.floating()
    return scope.result(scope.rng.choice(_COPIES), x) if x else None


@operator(3)
def reduction(scope: Scope) -> Statement | None:
    x = scope.floating()
    return scope.result(scope.rng.choice(_REDUCTIONS), x) if x else None


@operator(1.5)
def ordered(scope: Scope) -> Statement | None:
    x = scope.floating()
    return scope.result(scope.rng.choice(_ORDERED), x) if x else None


@operator(1)
def scan(scope: Scope) -> Statement | None:
    x = scope.floating()
    return scope.result(scope.rng.choice(_SCANS), x, chance=True) if x else None


@operator(2)
def gather(scope: Scope) -> Statement | None:
    x, y = scope.floating(), scope.floating()
    if not x or not y or not scope.is_never_empty(x):
        return None
    return scope.result(scope.rng.choice(_GATHERS), x, y)


@operator(1.5)
def scatter(scope: Scope) -> Statement | None:
    x, y = scope.writable(torch.is_floating_point), scope.floating()
    if not x or not y or not scope.is_never_empty(x):
        return None
    if scope.rng.random() < 0.5:
        return Statement([], scope.rng.choice(_SCATTERS_IN_PLACE), [x, y], writes=[0])
    return scope.result(scope.rng.choice(_SCATTERS), x, y)


@operator(0.3)
def atomic(scope: Scope) -> Statement | None:
    x, y = scope.floating(), scope.floating()
    if not x or not y or not scope.is_never_empty(x):
        return None
    return scope.result(scope.rng.choice(_ATOMIC), x, y, chance=True)


@operator(2)
def whole_numbers(scope: Scope) -> Statement | None:
    x = scope.pick(lambda t: not t.is_floating_point() and not t.is_complex())
    return scope.result(scope.rng.choice(_WHOLE), x) if x else None


@operator(1)
def sized(scope: Scope) -> Statement | None:
    """What uses the integer argument."""
    if not scope.varies:
        return None
    texts = ("torch.zeros({0}, 3, device=DEVICE)", "torch.arange({0}, device=DEVICE).float() * {0}")
    return scope.result(scope.rng.choice(texts), SIZE)


@operator(2)
def random_numbers(scope: Scope) -> Statement | None:
    x = scope.writable(torch.is_floating_point)
    if not x:
        return None
    if scope.rng.random() < 0.25:
        own = (
            "torch.rand(5, 3, device=DEVICE, generator={0})",
            "torch.empty(9, device=DEVICE).normal_(generator={0})",
        )
        return scope.result(scope.rng.choice(own), GENERATOR)
    texts = [
        "torch.rand({0}.shape, device=DEVICE)",
        "torch.randn_like({0})",
        "F.dropout({0}, 0.5)",
        "torch.rand_like({0})",
        "torch.bernoulli(torch.nan_to_num({0}).sigmoid())",
        "torch.randint(0, 9, {0}.shape, device=DEVICE)",
        "{0}.clone().uniform_()",
        "torch.randperm(17, device=DEVICE)",
        "torch.empty_like({0}).exponential_()",
        "F.rrelu({0}, training=True)",
    ]
    if scope.rng.random() < 0.2:
        return Statement([], "{0}.normal_()", [x], writes=[0], draws=True)
    return scope.result(scope.rng.choice(texts), x, draws=True)
