"""How attention kernels are launched, in plain numbers: machine_code.py compiles what runs."""

from dataclasses import dataclass, replace

from disagg.kernels.formats_exact import ExactFormat
from disagg.kernels.formats_paged import PagedFormat

NVIDIA_COLUMNS = 8  # columns of a tensor-core product of 16 rows
AMD_COLUMNS = 16
NVIDIA_SHARED_BYTES = 96 << 10  # what consumer chips have too; data-centre chips have twice that
AMD_SHARED_BYTES = 64 << 10

AnyFormat = ExactFormat | PagedFormat


@dataclass(frozen=True)
class Shape:
    """What a kernel needs to know of the queries.

    queries:   M of each sequence; group: query heads of a KV head; rows: M * Hq
    columns:   C, queries times heads of one program
    copies:    how often each column is repeated in the product with K, to fill the tensor core
    groups:    V groups that lie side by side in the product with V, likewise
    batch_pad: at least B, see pad_batch
    """

    queries: int
    group: int
    rows: int
    columns: int
    copies: int
    groups: int
    batch_pad: int


def raw_shape(queries: tuple[int, int, int], heads: int, tensor_columns: int) -> Shape:
    """The shape for (B, M, Hq) queries over exact pages."""
    return _shape(queries, heads, tensor_columns, 1, 1)


def piece_shape(
    queries: tuple[int, int, int], heads: int, fmt: PagedFormat, tensor_columns: int, runs: int
) -> Shape:
    """The shape for (B, M, Hq) queries over pages made of pieces, of so many runs in all.

    Where half the columns of the tensor core are enough, each query takes two: both are the same
    for K, so that no thread holds a score twice, and they carry two groups of channels of V.
    """
    _, m, query_heads = queries
    groups = fmt.head_dim // fmt.v.scale.group if fmt.v.scale.by == "column" else 1
    pairs = groups % 2 == 0 and fmt.v.planes % groups == 0
    narrow = pairs and m * query_heads // heads <= tensor_columns // 2
    columns, copies = (tensor_columns // 2, 2) if narrow else (tensor_columns, 1)
    shape = _shape(queries, heads, columns, copies, copies)
    return replace(shape, batch_pad=pad_batch(runs))


def pad_batch(count: int) -> int:
    """A size for `count` sequences or runs: 32, a lane each, or four times as many, and so on.

    It is known when a kernel is compiled: few sizes mean few kernels while a batch grows.
    """
    size = 32
    while size < count:
        size *= 4
    return size


def tile_tokens(fmt: AnyFormat) -> int:
    """Tokens that the pages of one iteration stand for: a page, or four raw pages."""
    return fmt.tokens * fmt.tile_pages if isinstance(fmt, ExactFormat) else fmt.tokens


def tile_slots(fmt: AnyFormat) -> int:
    """Tokens that the pages of one iteration hold."""
    return fmt.slots * fmt.tile_pages if isinstance(fmt, ExactFormat) else fmt.tokens


def compile_options(fmt: AnyFormat, nvidia: bool) -> dict[str, int | bool]:
    """What the compiler is told. One warp: the softmax then never crosses warps.

    Left alone, ptxas stops at 168 registers for some kernels and spills (Triton 3.9).
    """
    options: dict[str, int | bool] = {"num_warps": 1, "enable_fp_fusion": True}
    if nvidia:
        options["maxnreg"] = 224 if isinstance(fmt, ExactFormat) else 255
    return options


def pipeline_stages(fmt: AnyFormat, nvidia: bool) -> int:
    """Stages of the loop over tiles: 3 keep two tiles loaded or on their way, 2 keep one.

    Tokens kept beside codes are few: most often there is one tile.
    """
    if isinstance(fmt, ExactFormat) and fmt.side is not None:
        return 2
    shared = NVIDIA_SHARED_BYTES if nvidia else AMD_SHARED_BYTES
    return 3 if 2 * _tile_bytes(fmt) + 2048 <= shared else 2


def programs_per_processor(fmt: AnyFormat) -> int:
    """Programs that are resident together: bound by registers to 8, or by shared memory."""
    buffered = (pipeline_stages(fmt, True) - 1) * _tile_bytes(fmt)
    return max(1, min(8, 2 * NVIDIA_SHARED_BYTES // buffered))


def _tile_bytes(fmt: AnyFormat) -> int:
    """Bytes of one iteration."""
    return tile_tokens(fmt) // fmt.tokens * fmt.block_bytes


def _shape(
    queries: tuple[int, int, int], heads: int, columns: int, copies: int, groups: int
) -> Shape:
    batch, m, query_heads = queries
    group, rows = query_heads // heads, m * query_heads
    return Shape(m, group, rows, columns, copies, groups, pad_batch(batch))
