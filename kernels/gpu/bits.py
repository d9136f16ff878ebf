"""Codes become tensor-core operands without being converted: the trick that makes decoding free.

A code word (formats.py) is 16 bits. Masking one field leaves an integer c * 2**p with p < 8. Read
as an fp16 the same bits are a subnormal number: exactly c * 2**p * 2**-24. So one AND, which works
on two words at once, yields two exact operands; no conversion, no subtraction, no shuffle. The
factor 2**(p - 24) belongs to a whole field, so it is undone on the few sums, not on the many codes.
Bits from 8 up are first shifted down by 8, together for four (2 bit) or two (4 bit) fields.

Tensor cores take subnormals exactly on NVIDIA; `unpack_mode_for` asks the chip. A chip that flushes
them uses the magic number: the field under the exponent 0x6400 is 1024 + c * 2**p, and subtracting
1024 is exact.

An e4m3 byte needs no conversion either: fp16 has the same fields, wider. Sign, exponent and
mantissa moved up by 7 bits are the number times 2**-8, because fp16 counts exponents from 15 and
e4m3 from 7; subnormals become subnormals. NaN would become 480, but no encoder writes it. NVIDIA
chips from 8.9 on convert two bytes at once, which takes fewer instructions, so there it is done.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

PLAIN = "plain"  # any back end and the interpreter
PTX = "ptx"  # NVIDIA: the compiler does not find the two-word AND by itself (Triton 3.6 to 3.9)
MAGIC = "magic"  # chips that flush subnormals


@triton.jit
def field(
    words,
    INDEX: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    UNPACK_MODE: tl.constexpr,
):
    """words int16 -> fp16 of the same shape: the codes of one field and half, times 1/weight."""
    POSITION: tl.constexpr = INDEX * BITS + HALF * 8
    SHIFT: tl.constexpr = POSITION // 8 * 8
    MASK: tl.constexpr = ((1 << BITS) - 1) << (POSITION - SHIFT)
    if UNPACK_MODE == "ptx":
        mask = tl.full(words.shape, MASK, tl.int16)
        if BITS == 8 and SHIFT == 8:  # the upper byte of each word, and one of 0
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x4341;", "=r,r,r", [words, mask], tl.float16,
                is_pure=True, pack=2,
            )  # fmt: skip
        elif SHIFT == 0:
            return tl.inline_asm_elementwise(
                "and.b32 $0, $1, $2;",
                "=r,r,r",
                [words, mask],
                tl.float16,
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, $2; }",
                "=r,r,r",
                [words, mask],
                tl.float16,
                is_pure=True,
                pack=2,
            )
    else:
        bits = (words.to(tl.int32) >> SHIFT) & MASK
        if UNPACK_MODE == "magic":
            return (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
        else:
            return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def weight(INDEX: tl.constexpr, BITS: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """What a sum over `field` of a field is multiplied by to be a sum over codes."""
    POSITION: tl.constexpr = INDEX * BITS % 8
    UNIT: tl.constexpr = 1.0 if UNPACK_MODE == "magic" else 16777216.0
    return UNIT / (1 << POSITION)


@triton.jit
def float8(codes, UNPACK_MODE: tl.constexpr):
    """Bytes of e4m3, int8 -> fp16 of the same shape: the numbers, times 1/weight."""
    if UNPACK_MODE == "ptx":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return ((codes.to(tl.int16) << 7) & -0x4080).to(tl.float16, bitcast=True)


@triton.jit
def float8_weight(UNPACK_MODE: tl.constexpr):
    """What a sum over `float8` is multiplied by to be a sum over the numbers."""
    if UNPACK_MODE == "ptx":
        return 1.0
    else:
        return 256.0


@triton.jit
def subnormal_kernel(words_ptr, o_ptr, UNPACK_MODE: tl.constexpr):
    """o = sum over the columns of the codes in field 0 of words [16, 16] int16, as 4-bit fields."""
    o_16 = tl.arange(0, 16)
    words = tl.load(words_ptr + o_16[:, None] * 16 + o_16[None, :])
    ones = tl.full([16, 16], 1.0, tl.float16)
    sums = tl.dot(field(words, 0, 0, 4, UNPACK_MODE), ones) * weight(0, 4, UNPACK_MODE)
    tl.store(o_ptr + o_16[:, None] * 16 + o_16[None, :], sums)


def takes_subnormals(device: torch.device, unpack_mode: str) -> bool:
    """Whether sums over codes come out exact."""
    words = torch.arange(256, dtype=torch.int16, device=device).view(16, 16)
    sums = torch.empty(16, 16, device=device)
    subnormal_kernel[(1,)](
        words, sums, unpack_mode, num_warps=1, enable_fp_fusion=False
    )
    exact = (words & 15).sum(1, dtype=torch.float32)
    return bool(torch.equal(sums, exact[:, None].expand(16, 16)))


@lru_cache
def unpack_mode_for(device: torch.device) -> str:
    """How this device reads codes, by test; the first call must not be inside a CUDA graph."""
    if device.type != "cuda":
        return PLAIN
    mode = PTX if torch.version.hip is None else PLAIN
    return mode if takes_subnormals(device, mode) else MAGIC
