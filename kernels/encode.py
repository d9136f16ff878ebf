"""Sealing pages on a GPU: the Triton form of reference_encode.encode_quantized, byte for byte.

One program encodes one side of one block. Both sides are a matrix whose rows are cut into groups
and planes and whose columns are cut into halves: for K rows are tokens and columns channels, for V
the other way round. Packing is a plain sum over planes and halves; nothing is shuffled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import QuantFormat

LARGEST = tl.constexpr(65504.0)  # of fp16
SMALLEST_SCALE = tl.constexpr(2.0**-24)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds half to even


@triton.jit
def encode_kernel(
    x_ptr, words_ptr, scales_ptr, stride_head, stride_row, stride_column, page_tokens,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, CODES: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """One side of one block.

    x_ptr:       [H, n, D] of any float dtype; a page begins page_tokens items after the one before
    words_ptr:   blocks [P, H, BLOCK] as int16; scales_ptr: the same as fp16; offsets are in bytes
    """
    HALVES: tl.constexpr = 4 // BITS
    R: tl.constexpr = ROWS // 4
    U: tl.constexpr = COLUMNS // HALVES
    R_PAD: tl.constexpr = triton.next_power_of_2(R)
    U_PAD: tl.constexpr = triton.next_power_of_2(U)
    LEVELS: tl.constexpr = (1 << BITS) - 1
    i_page, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_r, o_u = tl.arange(0, 4 * R_PAD), tl.arange(0, HALVES * U_PAD)
    row, column = o_r // R_PAD * R + o_r % R_PAD, o_u // U_PAD * U + o_u % U_PAD
    m_r, m_u = o_r % R_PAD < R, o_u % U_PAD < U
    p_x = x_ptr + i_page * page_tokens + i_head.to(tl.int64) * stride_head
    p_x += row[:, None].to(tl.int64) * stride_row + column[None, :].to(tl.int64) * stride_column
    x = tl.load(p_x, mask=m_r[:, None] & m_u[None, :], other=0.0).to(tl.float32)
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)
    block = (i_page * tl.num_programs(1) + i_head) * (BLOCK // 2)
    codes = tl.zeros([4 * R_PAD, HALVES * U_PAD], tl.int32)
    for g in tl.static_range(ROWS // GROUP):
        own = (m_r & (row // GROUP == g))[:, None]
        low = tl.min(tl.where(own, x, LARGEST), 0)
        high = tl.max(tl.where(own, x, -LARGEST), 0)
        largest = tl.maximum(tl.abs(low), tl.abs(high))
        scale = tl.maximum(tl.div_rn(high - low, LEVELS * 1.0), largest * (1.0 / 1024))
        scale = tl.maximum(scale, SMALLEST_SCALE).to(tl.float16)
        zero = tl.div_rn(low, scale.to(tl.float32)).to(tl.float16)
        inverse = tl.div_rn(1.0, scale.to(tl.float32))
        code = (x * inverse[None, :] - zero.to(tl.float32)[None, :]) + ROUND - ROUND
        code = tl.minimum(tl.maximum(code, 0.0), LEVELS * 1.0).to(tl.int32)
        codes = tl.where(own, code, codes)
        p_scale = scales_ptr + block + g * COLUMNS + column
        tl.store(p_scale + SCALE // 2, scale, mask=m_u)
        tl.store(p_scale + ZERO // 2, zero, mask=m_u)
    # [4 planes, R, halves, U] -> [R, U]
    fields = codes << (o_r // R_PAD * BITS)[:, None] << (o_u // U_PAD * 8)[None, :]
    fields = tl.reshape(fields, [4, R_PAD, HALVES, U_PAD])
    words = tl.sum(tl.sum(fields, 2), 0)
    w_r, w_u = tl.arange(0, R_PAD)[:, None], tl.arange(0, U_PAD)[None, :]
    p_words = words_ptr + block + CODES // 2 + w_r * U + w_u
    tl.store(p_words, words.to(tl.int16), mask=(w_r < R) & (w_u < U))


def encode_quantized(k: Tensor, v: Tensor, fmt: QuantFormat) -> Tensor:
    """Seal pages of one layer. Shapes, results and bytes as in reference_encode."""
    heads, n, _ = k.shape
    count = n // fmt.tokens
    blocks = torch.zeros(count, heads, fmt.block_bytes, dtype=torch.uint8, device=k.device)
    if not count:
        return blocks
    words, scales = blocks.view(torch.int16), blocks.view(torch.float16)
    sides = (
        (k, (1, 2), fmt.tokens, fmt.head_dim, fmt.k_group, fmt.k_codes, fmt.k_scale, fmt.k_zero),
        (v, (2, 1), fmt.head_dim, fmt.tokens, fmt.v_group, fmt.v_codes, fmt.v_scale, fmt.v_zero),
    )
    for x, axes, rows, columns, group, *offsets in sides:
        encode_kernel[(count, heads)](
            x, words, scales, x.stride(0), x.stride(axes[0]), x.stride(axes[1]),
            fmt.tokens * x.stride(1), fmt.bits, rows, columns, group, fmt.block_bytes, *offsets,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return blocks
