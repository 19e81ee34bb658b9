"""The GPU side of pygraph.fingerprint; apart from it because Triton is there only with a GPU."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def fingerprint_kernel(data, result, count, factor: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    word = tl.load(data + index, mask=index < count, other=0).to(tl.int64)
    mixed = (index + 1) * factor
    weight = mixed ^ (mixed >> 29)
    tl.atomic_add(result, tl.sum(word * weight, 0), sem="relaxed")
