"""The kernels whose registers are counted by spills.py, compiled as they are launched.

Pages are those of measured_formats.py, queries 32 sequences of 8 KV heads with 4 query heads each.
Attention on pages of exact tokens and of pieces is measured in machine_code.py; of the few tokens
that are kept exact beside codes, whose loop has one round, here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import triton
import triton.language as tl

from disagg.kernels import aligned_attention
from disagg.kernels.append import append_kernel, append_warps, made_of
from disagg.kernels.compete import BLOCK, compete_kernel, keep_kernel, key_norms_kernel
from disagg.kernels.encode import CHANNELS, encode_side_kernel, encode_warps, segment_scales_kernel
from disagg.kernels.encode_aligned import encode_planes_kernel
from disagg.kernels.formats import RawFormat
from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.lowrank import WARPS as LOW_RANK_WARPS
from disagg.kernels.lowrank import low_rank_kernel
from disagg.kernels.measured_formats import HEAD_DIM, exact_format, masked_format, piece_format
from disagg.kernels.measured_formats import PIECES as PAGES_OF_PIECES
from disagg.kernels.paged_aligned import aligned_warps
from disagg.kernels.raw_attention import attend_raw_kernel
from disagg.kernels.reduce import COLUMNS, FEW, MANY, merge_kernel
from disagg.kernels.runs import PAGES, SEGMENTS, run_spans_kernel
from disagg.kernels.sealing import SealFormat
from disagg.kernels.shape import NVIDIA_COLUMNS, compile_options, pipeline_stages, raw_shape

# types of arguments by name; of others, those that end in _ptr are int32 and the rest whole numbers
TYPES: dict[str, Any] = {
    **{
        f"{name}_ptr": "*fp32"
        for name in ("q", "o", "scores", "lse", "best", "part_lse", "part_o", "k_bits", "norms")
    },
    "x_ptr": "*fp16",
    "missing_ptr": "*fp16",
    "bytes_ptr": "*u8",
    "segments_ptr": "*u8",
    "tops_ptr": "*u8",
    "seeds_ptr": "*i64",
    "levels_ptr": "*i8",
    "states_ptr": "*u8",
    "won_ptr": "*u8",
    "k_ptr": "*fp16",
    "v_ptr": "*fp16",
    "kept_k_ptr": "*fp16",
    "kept_v_ptr": "*fp16",
    "arena_ptr": "*fp16",
    "scale": "fp32",
    "parts": (("*fp32", "*fp32", "*i32", "*i32", "i32", "i32", "i32"),) * 3,
}
PIECES = (  # name, and kind and bits of measured_formats.py
    ("2bit", "quantized", 2),
    ("4bit", "quantized", 4),
    ("int8", "rows", 8),
    ("fp8", "float", 8),
    ("lowrank-2bit", "lowrank", 2),
    ("sparse-2bit", "sparse", 2),
)


@dataclass(frozen=True)
class Source:
    """A kernel with its compile-time arguments."""

    kernel: triton.JITFunction
    constants: dict[str, Any]
    num_warps: int
    options: dict[str, int | bool] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)  # of arguments that TYPES has otherwise


def _encode(kind: str, bits: int, is_v: bool, columns: int) -> Source:
    fmt = piece_format(kind, bits)
    side = fmt.v if is_v else fmt.k
    constants = {"FMT": fmt, "IS_V": is_v, "absent_ptr": None}
    along = "row" if is_v else "column"  # a stride of 1 is known to the compiler
    constants |= {f"stride_{along}": 1, f"missing_{along}": 1}
    return Source(encode_side_kernel, constants, encode_warps(side))


def _scales(kind: str, columns: int) -> Source:
    side = piece_format(kind, 4).k
    constants = {"SIDE": side, "BYTES": 4 * HEAD_DIM, "CHANNELS": CHANNELS, "stride_channel": 1}
    return Source(segment_scales_kernel, constants, 4)


def _low_rank(columns: int) -> Source:
    return Source(low_rank_kernel, {"FMT": piece_format("lowrank", 2)}, LOW_RANK_WARPS)


def _planes(is_v: bool, columns: int) -> Source:
    fmt, sizes = _aligned_format(), (64, HEAD_DIM) if is_v else (HEAD_DIM, 64)
    planes = [getattr(fmt, f"{'kv'[is_v]}_{x}") for x in ("high", "middle", "low", "top")]
    names = ("ROWS", "COLUMNS", "BLOCK", "HIGH", "MIDDLE", "LOW", "TOP", "TOP_AXIS")
    constants = dict(zip(names, (*sizes, fmt.block_bytes, *planes, 1 - is_v), strict=True))
    return Source(encode_planes_kernel, constants | {f"stride_{'column' if is_v else 'row'}": 1}, 4)


def _aligned(name: str, warps: int, columns: int) -> Source:
    constants = {"FMT": _aligned_format(), "SHAPE": raw_shape((32, 1, 32), 8, columns)}
    return Source(getattr(aligned_attention, f"{name}_kernel"), constants, warps)


def _aligned_format() -> AlignedFormat:
    whole, half = 64 * HEAD_DIM, 32 * HEAD_DIM
    sizes = (whole, half, half, whole, half, half, HEAD_DIM, HEAD_DIM)
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return AlignedFormat(64, HEAD_DIM, sum(sizes), *offsets)


def _encode_masked(is_v: bool, columns: int) -> Source:
    fmt = masked_format()
    constants = {"FMT": fmt, "IS_V": is_v}
    constants |= {f"{name}_{'row' if is_v else 'column'}": 1 for name in ("stride", "missing")}
    warps = encode_warps(fmt.v if is_v else fmt.k)
    return Source(encode_side_kernel, constants, warps, types={"absent_ptr": "*u8"})


def _append(kind: str | None, bits: int, columns: int) -> Source:
    fmt: SealFormat | None = _aligned_format() if kind == "planes" else None
    if kind in PAGES_OF_PIECES:
        fmt = piece_format(kind, bits)
    half = 32 * HEAD_DIM
    raw = RawFormat("float16", HEAD_DIM, 2 * half, 0, half)
    types = {"arena_ptr": "*u8", "segments_ptr": "*i32"}
    constants = {"RAW": raw, "FMT": fmt, "MADE_OF": made_of(fmt)}
    return Source(append_kernel, constants, append_warps(fmt), types=types)


def _competition(kernel: triton.JITFunction, constants: dict[str, int], columns: int) -> Source:
    return Source(kernel, constants, 1 if kernel is keep_kernel else 4)


def _kept(columns: int) -> Source:
    fmt, nvidia = exact_format("kept", "float16"), columns == NVIDIA_COLUMNS
    constants = {"FMT": fmt, "SHAPE": raw_shape((32, 1, 32), 8, columns), "OPERAND": tl.float16}
    constants |= {
        "PRECISION": "tf32x3" if nvidia else "ieee",
        "STAGES": pipeline_stages(fmt, nvidia),
    }
    constants |= {"span_lo_ptr": None, "span_hi_ptr": None}
    return Source(attend_raw_kernel, constants, 1, compile_options(fmt, nvidia))


def _merge(units: int, num_warps: int, columns: int) -> Source:
    constants = {"PARTS": 3, "D": HEAD_DIM, "BATCH_PAD": 32, "UNITS": units, "COLUMNS": COLUMNS}
    return Source(merge_kernel, constants, num_warps)


def _runs(columns: int) -> Source:
    return Source(run_spans_kernel, {"TOKENS": 64, "SEGMENTS": SEGMENTS, "PAGES": PAGES}, 4)


# what makes a source, given the columns of a tensor-core product on the chip
SOURCES: dict[str, Callable[[int], Source]] = {
    **{
        f"encode-{name}-{side}": partial(_encode, kind, bits, side == "v")
        for name, kind, bits in PIECES
        for side in "kv"
    },
    "encode-planes-k": partial(_planes, False),
    "encode-planes-v": partial(_planes, True),
    "encode-masked-k": partial(_encode_masked, False),
    "encode-masked-v": partial(_encode_masked, True),
    "append": partial(_append, None, 0),
    "append-planes": partial(_append, "planes", 16),
    **{f"append-{name}": partial(_append, kind, bits) for name, kind, bits in PIECES},
    "segment-scales": partial(_scales, "quantized"),
    "segment-scales-sparse": partial(_scales, "sparse"),
    "low-rank": _low_rank,
    "key-norms": partial(
        _competition, key_norms_kernel, {"D": HEAD_DIM, "TOKENS": 64, "stride_channel": 1}
    ),
    "compete": partial(_competition, compete_kernel, {"SLOTS": 35, "BLOCK": BLOCK}),
    "keep": partial(_competition, keep_kernel, {"D": HEAD_DIM}),
    "attend-kept": _kept,
    "merge-few": partial(_merge, FEW, 1),
    "merge-many": partial(_merge, MANY, 4),
    "run-spans": _runs,
    "aligned-levels": partial(_aligned, "channel_levels", 4),
    "aligned-scores": partial(_aligned, "plane_scores", aligned_warps(HEAD_DIM)),
    "aligned-drops": partial(_aligned, "allow_drops", 1),
    "aligned-values": partial(_aligned, "plane_values", aligned_warps(HEAD_DIM)),
}
