"""Statements of library kernels (products, convolutions, attention, transforms), of custom operators
and Triton kernels, and of what runs between partitions."""

from __future__ import annotations

import torch

from .program import Statement
from .scope import Scope, operator

_IMAGE = "{0}.flatten()[:64].reshape(1, 1, 8, 8)"
_PLANES = "{0}.flatten()[:64].reshape(1, 4, 4, 4)"
_ROW = "{0}.flatten()[:32].reshape(1, 2, 16)"
_CONVOLUTIONS = (
    f"F.conv2d({_IMAGE}, {{1}}.flatten()[:9].reshape(1, 1, 3, 3), padding=1)"
    f"|F.conv2d({_PLANES}, {{1}}.flatten()[:36].reshape(4, 1, 3, 3), groups=4)"
    f"|F.conv2d({_PLANES}, {{1}}.flatten()[:32].reshape(8, 4, 1, 1))"
    f"|F.conv1d({_ROW}, {{1}}.flatten()[:12].reshape(2, 2, 3), stride=2)"
    f"|F.conv_transpose2d({_IMAGE}, {{1}}.flatten()[:4].reshape(1, 1, 2, 2), stride=2)"
    f"|F.conv2d({_PLANES}.to(memory_format=torch.channels_last), "
    "{1}.flatten()[:32].reshape(8, 4, 1, 1))"
).split("|")
_POOLS = (
    f"F.max_pool2d({_IMAGE}, 2)|F.avg_pool2d({_IMAGE}, 3, 2)|F.adaptive_avg_pool2d({_IMAGE}, 3)"
    f"|F.max_pool1d({_ROW}, 3, 2)|F.interpolate({_IMAGE}, scale_factor=2)|F.lp_pool2d({_IMAGE}, 2, 2)"
    f"|F.interpolate({_IMAGE}, size=(5, 5), mode='bilinear')|F.pixel_shuffle({_PLANES}, 2)"
    f"|F.pad({_IMAGE}, (1, 1, 1, 1), mode='reflect')|F.unfold({_IMAGE}, 3)"
    f"|F.grid_sample({_IMAGE}, {{0}}.flatten()[:32].reshape(1, 4, 4, 2), align_corners=False)"
).split("|")
_NORMS = (
    "F.layer_norm({0}, {0}.shape[-1:])|torch.softmax({0}, -1)|torch.log_softmax({0}, 0)"
    f"|F.group_norm({_PLANES}, 2)|F.instance_norm({_PLANES})|F.rms_norm({{0}}, {{0}}.shape[-1:])"
    "|F.normalize({0}, dim=-1)|F.mse_loss({0}, {1})|F.huber_loss({0}, {1})|F.glu({0}, -1)"
    "|F.cross_entropy({0}.reshape(-1, {0}.shape[-1]), {0}.argmax(-1).flatten())"
    "|F.cosine_similarity({0}, {1}, -1)|torch.cdist({0}, {0})"
).split("|")
_PRODUCTS = [
    "{0} @ {1}.transpose(-1, -2) / 8",
    "{0} @ {1}",
    "torch.matmul({0}, {1}.flatten()[:{0}.shape[-1]]) / 8",
    "F.linear({0}, {1})",
    "torch.outer({0}.flatten()[:9], {1}.flatten()[:7])",
    "{0}.transpose(-1, -2) @ {0}",
    "torch.einsum('...i,...i->...', {0}, {1})",
    "torch.addmm({0}, {0}, {0}.t() @ {0}, beta=0.5, alpha=0.1)",
    "torch.mm({0}, {1}.t(), out={0}.new_empty({0}.shape[0], {1}.shape[0]))",
    "torch.bmm({0}[None], {1}.t()[None])",
    "torch.tensordot({0}, {1}, ([0], [0]))",
    "torch.baddbmm({0}[None, :, :1], {0}[None], {1}.t()[None])",
    "F.bilinear({0}, {0}, {0}[None, :, :1] * {0}[None, :1])",
    "torch.mv({0}, {1}[0])",
    "torch.linalg.multi_dot([{0}, {1}.t(), {0}])",
    "torch.kron({0}[:2, :2], {1}[:2, :2])",
    "{0}.to(torch.bfloat16) @ {1}.to(torch.bfloat16).t()",
    "{0}.clamp(-9, 9).half() @ {1}.clamp(-9, 9).half().t()",
]
_TRANSFORMS = [
    "torch.fft.rfft({0}.float()).abs()",
    "torch.fft.fft2({0}.float()).real",
    "torch.fft.irfft({0}.float())",
    "torch.view_as_real(torch.fft.fft({0}.float()))",
    "torch.fft.fft({0}.float()).conj().imag",
    "torch.view_as_real(torch.complex({0}.float(), {0}.float()) * 2j)",
    "torch.fft.fftshift({0})",
    "torch.stft({0}.float().flatten()[:64], 16, return_complex=True).abs()",
]
# Computed, because PyTorch's kernels need aligned memory, and Inductor leaves clones out.
_HEADS = ".flatten()[:512].mul(0.5).reshape(1, 2, 16, 16)"
_ATTENTION = (
    f"F.scaled_dot_product_attention({{0}}{_HEADS}, {{1}}{_HEADS}, {{1}}{_HEADS})"
    f"|F.scaled_dot_product_attention({{0}}{_HEADS}, {{1}}{_HEADS}, {{1}}{_HEADS}, is_causal=True)"
    f"|F.scaled_dot_product_attention({{0}}{_HEADS}.half(), {{1}}{_HEADS}.half(), {{1}}{_HEADS}.half())"
    f"|F.scaled_dot_product_attention({{0}}{_HEADS}, {{1}}{_HEADS}, {{1}}{_HEADS}, "
    "attn_mask={0}.flatten()[:256].reshape(16, 16) > -9)"
).split("|")
_FOREACH = [
    "torch._foreach_add([{0}, {1}], 1)",
    "torch._foreach_mul([{0}, {1}], [2.0, 0.5])",
    "torch._foreach_sin([{0}, {1}])",
    "torch._foreach_add([{0}, {1}], [{1}, {0}])",
    "torch._foreach_addcmul([{0}, {1}], [{1}, {0}], [{0}, {1}], 0.1)",
    "torch._foreach_norm([{0}, {1}])",
    "torch._foreach_lerp([{0}, {1}], [{1}, {0}], 0.25)",
    "torch._foreach_sqrt(torch._foreach_abs([{0}, {1}]))",
]
_FOREACH_IN_PLACE = [
    "torch._foreach_add_([{0}, {1}], 1)",
    "torch._foreach_mul_([{0}, {1}], 1.0)",
    "torch._foreach_zero_([{0}])",
    "torch._foreach_copy_([{0}], [{1}])",
    "torch._foreach_clamp_min_([{0}, {1}], -1.0)",
]


def _two(scope: Scope, least: int = 1, dims: int | None = None) -> tuple[str, str] | None:
    def fits(t: torch.Tensor) -> bool:
        enough = t.numel() >= least and (dims is None or t.dim() == dims)
        return t.is_floating_point() and enough

    x = scope.pick(fits)
    if not x:
        return None
    dtype = scope.tensor(x).dtype
    y = scope.pick(lambda t: fits(t) and t.dtype == dtype)
    return (x, y) if y else None


def _of_two(scope: Scope, texts: list[str], least: int, dims: int | None = None) -> Statement | None:
    names = _two(scope, least, dims)
    return scope.result(scope.rng.choice(texts), *names) if names else None


@operator(2)
def convolution(scope: Scope) -> Statement | None:
    return _of_two(scope, _CONVOLUTIONS, 64)


@operator(1.5)
def pooling(scope: Scope) -> Statement | None:
    return _of_two(scope, _POOLS, 64)


@operator(2)
def normalization(scope: Scope) -> Statement | None:
    return _of_two(scope, _NORMS, 2)


@operator(0.7)
def batch_norm(scope: Scope) -> Statement | None:
    """Writes its running statistics."""
    x = scope.floating(2)
    if not x or scope.tensor(x).dtype != torch.float32:
        return None
    width = scope.tensor(x).shape[1]
    mean = scope.writable(lambda t: t.shape == (width,) and t.dtype == torch.float32)
    if not mean:
        return None
    text = "F.batch_norm({0}, {1}, torch.ones({0}.shape[1], device=DEVICE), training=True)"
    return scope.result(text, x, mean, writes=[1])


@operator(4)
def product(scope: Scope) -> Statement | None:
    return _of_two(scope, _PRODUCTS, 1, dims=2 if scope.rng.random() < 0.8 else None)


@operator(1)
def product_in_place(scope: Scope) -> Statement | None:
    names = _two(scope, 1, 2)
    if not names:
        return None
    target = scope.writable(lambda t: t.dtype == scope.tensor(names[0]).dtype and t.dim() == 2)
    if not target or any(scope.share(target, name) for name in names):
        return None
    text = "{0}.addmm_({1}, {2}.t(), alpha=0.1)"
    return Statement([], text, [target, *names], writes=[0], fragile=True)


@operator(1)
def transform(scope: Scope) -> Statement | None:
    return _of_two(scope, _TRANSFORMS, 2)


@operator(1.5)
def attention(scope: Scope) -> Statement | None:
    if scope.rng.random() < 0.2:
        x = scope.pick(lambda t: t.is_floating_point() and t.numel() >= 512)
        heads = "{0}" + _HEADS
        text = f"F.scaled_dot_product_attention({heads}, {heads}, {heads}, dropout_p=0.5)"
        return scope.result(text, x, draws=True) if x else None
    return _of_two(scope, _ATTENTION, 512)


@operator(1)
def lists_of_tensors(scope: Scope) -> Statement | None:
    names = _two(scope)
    if not names or not all(
        scope.always(n, lambda t: t.numel() > 0 and 0 not in t.stride()) for n in names
    ):
        return None
    if scope.rng.random() < 0.4 and not scope.share(*names):
        return Statement(
            [], scope.rng.choice(_FOREACH_IN_PLACE), list(names), writes=[0, 1], fragile=True
        )
    return scope.result(scope.rng.choice(_FOREACH), *names, count=2)


@operator(2.5)
def custom(scope: Scope) -> Statement | None:
    x = scope.writable(lambda t: t.is_floating_point() and t.is_contiguous())
    y = scope.like(x) if x else None
    if not x or not y:
        return None
    kind = scope.rng.randrange(7)
    same = scope.always(y, torch.Tensor.is_contiguous) and not scope.share(x, y)
    if kind == 0:
        return scope.result("torch.ops.pygraph_fuzz.twice({0})", x)
    if kind == 1:
        return scope.result("torch.ops.pygraph_fuzz.pair({0})", x, count=2)
    if kind == 2:
        return scope.result("ops.triton_scale({0})", x)
    if not same:
        return None
    texts = (
        "torch.ops.pygraph_fuzz.add_into({0}, {1})",
        "ops.triton_add({0}, {1})",
        "ops.triton_where_large({0}, {1})",
    )
    if kind < 6 or scope.is_compiled:  # compilers believe what operators declare
        kind = min(kind, 5)
        return Statement([], texts[kind - 3], [x, y], writes=[0], fragile=True)
    return scope.result("ops.hidden_write({0}, {1})", x, y, writes=[0], fragile=True)


@operator(0.8)
def between_partitions(scope: Scope) -> Statement | None:
    x = scope.floating()
    if not x or not scope.is_never_empty(x):
        return None
    texts = (
        (
            "torch.full_like({0}, min(1.0, abs(float({0}.flatten()[0].item()))))",
            "torch.empty_like({0})",
        ),
        ("{0} * (({0} > 1e9).nonzero().shape[0] + 1)", "torch.empty_like({0})"),
        ("{0}.cpu().to(DEVICE)", "{0}.clone()"),
        ("torch.ops.pygraph_fuzz.outside({0})", ""),
    )
    text, meta = scope.rng.choice(texts)
    return scope.result(text, x, meta=meta, cut=True)


@operator(0.1)
def waiting_inside(scope: Scope) -> Statement | None:
    """What cannot be captured, within a partition: it is refused, and the program goes on."""
    x = scope.floating()
    texts = (
        "torch.tensor([1.0, 2.0]).to(DEVICE)",
        "{0}[{0} > 0].sum()",
        "torch.tensor([-1.0, 0.0], device=DEVICE)",
    )
    metas = ("torch.empty(2, device=DEVICE)", "{0}.sum()", "torch.empty(2, device=DEVICE)")
    number = scope.rng.randrange(3)
    return scope.result(texts[number], x, meta=metas[number]) if x else None
