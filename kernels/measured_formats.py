"""The pages whose kernels are measured: 128 channels; codes of 64 tokens in groups of 64."""

from dataclasses import replace

from disagg.kernels.formats import QuantFormat, RawFormat
from disagg.kernels.formats_exact import ExactFormat, as_exact, dropped_as_exact
from disagg.kernels.formats_paged import LowRank, PagedFormat, Scale, Side, Sparse
from disagg.kernels.reference_dropped import DroppedFormat
from disagg.kernels.reference_kept import KeptFormat

HEAD_DIM = 128
PIECES = {  # rank, sparse slots of K and V; as a page of 64 tokens has them
    "quantized": (0, 0, 0),
    "lowrank": (4, 0, 0),
    "sparse": (4, 1, 2),
    "rows": (0, 0, 0),
    "float": (0, 0, 0),
}


def page_format(bits: int) -> QuantFormat:
    """A page of 64 tokens in groups of 64."""
    halves = 4 // bits
    code_bytes = 64 * HEAD_DIM // 2 // halves
    sizes = [code_bytes, code_bytes, 2 * HEAD_DIM, 2 * HEAD_DIM]
    sizes += [128 * HEAD_DIM // 64] * 2
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return QuantFormat(bits, 64, HEAD_DIM, 64, 64, sum(sizes), *offsets)


def exact_format(kind: str, dtype: str) -> ExactFormat:
    """16-bit pages: "raw"; "kept", 35 slots of them; or "dropped", 32 of 64 tokens."""
    half = 32 * HEAD_DIM
    if kind == "dropped":
        return dropped_as_exact(
            DroppedFormat(64, 32, HEAD_DIM, 4 * half + 128, 0, 2 * half, 4 * half)
        )
    raw = RawFormat(dtype, HEAD_DIM, 2 * half, 0, half)
    return as_exact(raw, KeptFormat(35, 336, 0, 144, 288) if kind == "kept" else None)


def piece_format(kind: str, bits: int) -> PagedFormat:
    """A page of 64 tokens made of pieces, and its segment; groups of 64, ranks of 4."""
    rank, *slots = PIECES[kind]
    sides, end, segment = [], 0, 0
    by = {"rows": ("row", "column"), "float": ("block", "block")}.get(kind, ("column", "column"))
    for i, (rows, columns) in enumerate(((64, HEAD_DIM), (HEAD_DIM, 64))):
        plane = 16 if kind == "float" else 2 * rows * columns // 64 // (1 + (kind == "rows"))
        codes, scale, zero = end, end + rows * columns * bits // 8, None
        end = scale + plane
        if bits < 8:
            zero, end = end, end + plane
        group = HEAD_DIM if kind == "rows" else 64
        side = Side(rows, columns, bits, codes, Scale(by[i], group, scale, zero, -(1 << bits - 1)))
        if kind == "float":
            side = replace(side, floating=True, scale=Scale("block", 1, scale))
        if rank:
            side = replace(side, low_rank=LowRank(rank, end, segment))
            end, segment = end + 2 * 64 * rank, segment + 2 * HEAD_DIM * rank
        if slots[i]:
            side = replace(side, sparse=Sparse(slots[i], end, end + columns * slots[i]))
            end += 3 * columns * slots[i]
        sides.append(side)
    return PagedFormat(64, HEAD_DIM, end, segment, sides[0], sides[1])


def masked_format() -> PagedFormat:
    """A page of 128 tokens at 2 bits, groups of 128, with a mask of the tokens that are there."""
    codes, plane = 128 * HEAD_DIM // 4, 2 * 128
    end = 2 * codes + 4 * plane
    sides = []
    for i in range(2):
        scale = 2 * (codes + i * plane)
        by_column = Scale("column", 128, scale, scale + plane)
        sides.append(Side(128, HEAD_DIM, 2, i * codes, by_column))
    return PagedFormat(128, HEAD_DIM, end + 16, 0, sides[0], sides[1], valid=end)
