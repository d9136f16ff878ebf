"""What the encode kernels compute, in plain torch; also the CPU path. formats.py draws the bytes.

Per group of K (tokens of one channel) or V (channels of one token), x in fp32, saturated to fp16:

    scale = fp16(max((max - min) / (2**bits - 1), max|x| / 1024, 2**-24))
    zero  = fp16(min / scale)                       in code units; |zero| is about 1024 at most
    code  = clamp(round(x / scale - zero), 0, 2**bits - 1)      from the rounded scale and zero

The second term makes a constant group exact in fp16 and keeps the zero in range; the third keeps
the scale from vanishing. x' = scale * (code + zero).
"""

import torch
from torch import Tensor

from disagg.kernels.formats import PLANES, QuantFormat
from disagg.kernels.reference_words import pack_words, unpack_words

LARGEST = 65504.0  # of fp16
ZERO_LIMIT = 1024.0  # fp16 holds every integer up to twice this
SMALLEST_SCALE = 2.0**-24  # the least positive fp16

# elements of K encoded at once: their floats stay in a core's second-level cache
CHUNK_ELEMENTS = 1 << 17


def encode_quantized(k: Tensor, v: Tensor, fmt: QuantFormat) -> Tensor:
    """Seal pages of one layer: K quantised per channel, V per token.

    k, v:    [H, n, D] of any float dtype - n is a multiple of fmt.tokens; inf and what fp16 cannot
             hold saturate to +-65504, NaN becomes 0
    returns: [n / fmt.tokens, H, fmt.block_bytes] u8
    error:   |x' - x| <= scale/2 + 2**-11 (|x| + scale * 2**bits)
    """
    heads, n, head_dim = k.shape
    count = n // fmt.tokens
    blocks = torch.zeros(count, heads, fmt.block_bytes, dtype=torch.uint8)
    sides = [
        (k.unflatten(1, (count, fmt.tokens)).transpose(0, 1), fmt.k_group, "k"),
        (v.unflatten(1, (count, fmt.tokens)).transpose(0, 1).transpose(2, 3), fmt.v_group, "v"),
    ]
    step = max(1, CHUNK_ELEMENTS // (heads * fmt.tokens * head_dim))
    for x, group, side in sides:
        words, scales, zeros = _planes(blocks, fmt, side)
        for start in range(0, count, step):
            part = slice(start, start + step)
            codes, scales[part], zeros[part] = quantize(x[part].float(), group, fmt.bits)
            words[part] = pack_words(codes, fmt.bits)
    return blocks


def decode_quantized(
    blocks: Tensor, fmt: QuantFormat, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """What attention sees: blocks [..., block_bytes] u8 -> k', v' [..., tokens, D] of dtype."""
    found = []
    for side in ("k", "v"):
        words, scales, zeros = _planes(blocks, fmt, side)
        codes = unpack_words(words, fmt.bits, dtype)
        groups = codes.unflatten(-2, (scales.shape[-2], -1))
        x = (groups + zeros.to(dtype).unsqueeze(-2)) * scales.to(dtype).unsqueeze(-2)
        found.append(x.flatten(-3, -2))
    return found[0], found[1].transpose(-1, -2)


def quantize(x: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups of rows.

    x:       [..., rows, columns] fp32
    returns: codes [..., rows, columns] fp32, scales and zeros [..., rows/group, columns] fp16
    """
    levels = (1 << bits) - 1
    groups = x.unflatten(-2, (-1, group))
    low, high = groups.amin(-2), groups.amax(-2)  # ten times as fast as aminmax
    if not bool(((low >= -LARGEST) & (high <= LARGEST)).all()):  # also where one is NaN
        groups = torch.nan_to_num(groups, nan=0.0).clamp(-LARGEST, LARGEST)
        low, high = groups.amin(-2), groups.amax(-2)
    largest = torch.maximum(low.abs(), high.abs())
    scale = torch.maximum((high - low) / levels, largest / ZERO_LIMIT)
    scale = scale.clamp_min_(SMALLEST_SCALE).half()
    steps = scale.float()
    zero = (low / steps).half()
    inverse = steps.reciprocal_().unsqueeze(-2)
    codes = torch.addcmul(-zero.float().unsqueeze(-2), groups, inverse)
    return codes.round_().clamp_(0, levels).flatten(-3, -2), scale, zero


def _planes(blocks: Tensor, fmt: QuantFormat, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the code words, scales and zeros of one side of blocks [..., block_bytes]."""
    if side == "k":
        rows, columns, group = fmt.tokens, fmt.head_dim, fmt.k_group
        offsets = (fmt.k_codes, fmt.k_scale, fmt.k_zero)
    else:
        rows, columns, group = fmt.head_dim, fmt.tokens, fmt.v_group
        offsets = (fmt.v_codes, fmt.v_scale, fmt.v_zero)
    return (
        _view(blocks, offsets[0], torch.int16, (rows // PLANES, columns // fmt.halves)),
        _view(blocks, offsets[1], torch.float16, (rows // group, columns)),
        _view(blocks, offsets[2], torch.float16, (rows // group, columns)),
    )


def _view(blocks: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return blocks[..., offset : offset + nbytes].view(dtype).unflatten(-1, shape)
