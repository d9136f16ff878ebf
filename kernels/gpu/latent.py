"""Attention on latents on a GPU: pages of one KV head whose V is the first channels of K.

Part of attend.py's kernel.

    memory       registers         shared memory          tensor cores
    fp16 ─────────────────────────> tile [T, r + d] ──┬── scores [64, T]  = q tile^T
    bf16, codes ─> decoded, fp16 ─>                   └── sums   [64, r] += p tile[:, :r]

A tile is read, and decoded, once for both products and for 64 query heads, which all read the one
KV head. Other than in exact.py and codes.py, queries are the rows of a product: the tile is the
operand that tensor cores of sm_90 and sm_100 read from shared memory, where both products find it.
Fewer than 64 heads leave rows idle; reading the tile takes longer than that.

Channels come in parts: a part is decoded and stored before the next, or registers would spill. What
codes decode to is halved, so that it never overflows fp16. bf16 loses nothing as fp16, but below
2**-14, where 2**-25 is lost, and saturates above 65504.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels import formats
from disagg.kernels.formats import ExactFormat, PageFormat
from disagg.kernels.gpu.exact import load_pages
from disagg.kernels.gpu.qk import codes_of, weight_of
from disagg.kernels.gpu.tiles import EMPTY, P_BIAS, as_scales, load_tile, stack

STRIP = tl.constexpr(formats.STRIP)
HALF = tl.constexpr(0.5)  # what numbers of codes are multiplied by
LARGEST = tl.constexpr(65504.0)  # of fp16
WHOLE_PART = 256  # channels of a part that is not decoded
DECODED_PART = 128


@triton.jit
def attend_latents(
    start, end, i_segment, p_q, lo, hi, m_c, arena_ptr, row_ptr, width, base, segment_base,
    o_ptr, lse_ptr, i_out, rows, scale, VIEW: tl.constexpr,
):  # fmt: skip
    """Attention of C rows over the tiles of one unit; arguments as in `attend_codes`.

    p_q:   [C] pointers to rows of `scale_query`
    width: columns of the page table
    i_out: the first row in o and lse; the others follow, for there is one KV head
    rows:  of this program and all behind it
    """
    FMT: tl.constexpr = VIEW.fmt
    CODES: tl.constexpr = VIEW.codes
    STAGES: tl.constexpr = VIEW.stages
    CAP: tl.constexpr = VIEW.cap
    C: tl.constexpr = VIEW.shape.columns
    T: tl.constexpr = FMT.tokens if CODES else FMT.tokens * FMT.tile_pages
    PARTS: tl.constexpr = count_parts(FMT)
    UNIT: tl.constexpr = 2.0 if CODES else 1.0
    ITEM: tl.constexpr = tl.int16 if CODES else VIEW.item
    items_ptr = arena_ptr.to(tl.pointer_type(ITEM), bitcast=True)
    segment = items_ptr
    if CODES:
        segment += i_segment.to(tl.int64) * 64 + segment_base // 2
    p_unit = (p_q + FMT.head_dim).to(tl.pointer_type(tl.float32), bitcast=True)
    q_unit = tl.load(p_unit, mask=m_c, other=0.0) * (scale * UNIT)
    q = ()
    for j in tl.static_range(PARTS):
        q = q + (load_query(p_q, m_c, j, FMT),)
    m = tl.full([C], EMPTY, tl.float32)
    l = tl.zeros([C], tl.float32)
    o = ()
    for j in tl.static_range(PARTS - 1):
        o = o + (tl.zeros([C, padded_part(FMT, j)], tl.float32),)
    o_t = tl.arange(0, T)
    pages = load_ids(row_ptr, start, width, FMT)
    # else the addresses of all operands wait in registers, and these spill (Triton 3.9)
    for i in tl.range(start, end, num_stages=STAGES, disable_licm=True):
        s = tl.zeros([C, T], tl.float32)
        tile = ()
        for j in tl.static_range(PARTS):
            b_x = load_part(items_ptr, pages, base, segment, j, VIEW)
            s = tl.dot(q[j], tl.trans(b_x), s)
            tile = tile + (b_x,)
        pages = load_ids(row_ptr, i + 1, width, FMT)
        m_s = o_t[None, :] >= (lo - i * T)[:, None]
        m_s = m_s & (o_t[None, :] < (hi - i * T)[:, None])
        s = tl.where(m_s, s * q_unit[:, None], float("-inf"))
        p, decay, m, l = softmax_rows(s, m, l, CAP)
        p = p.to(tl.float16)
        sums = ()
        for j in tl.static_range(PARTS - 1):
            b_o = o[j] * decay[:, None]
            sums = sums + (tl.dot(p, tile[j], b_o),)
        o = sums

    o_c = tl.arange(0, C)
    tl.store(lse_ptr + i_out + o_c, m + tl.log2(l) - P_BIAS, mask=o_c < rows)
    inverse = tl.where(l > 0, UNIT / l, 0.0)
    p_o = o_ptr + i_out.to(tl.int64) * FMT.latent + (o_c * FMT.latent)[:, None]
    for j in tl.static_range(PARTS - 1):
        o_d = tl.arange(0, o[j].shape[1])
        m_o = (o_c < rows)[:, None] & (o_d < part_channels(FMT, j))[None, :]
        p_part = p_o + (first_channel(FMT, j) + o_d)[None, :]
        tl.store(p_part, o[j] * inverse[:, None], mask=m_o)


@triton.constexpr_function
def part_width(fmt: ExactFormat | PageFormat) -> int:
    """Channels of a part, but for the last ones."""
    is_decoded = isinstance(fmt, PageFormat) or fmt.dtype == "bfloat16"
    return DECODED_PART if is_decoded else WHOLE_PART


@triton.constexpr_function
def count_parts(fmt: ExactFormat | PageFormat) -> int:
    """Parts of the latent, and that of the rotated key."""
    return triton.cdiv(fmt.latent, part_width(fmt)) + 1


@triton.constexpr_function
def first_channel(fmt: ExactFormat | PageFormat, j: int) -> int:
    """The first channel of part j."""
    return min(j * part_width(fmt), fmt.latent)


@triton.constexpr_function
def part_channels(fmt: ExactFormat | PageFormat, j: int) -> int:
    """Channels of part j."""
    first = first_channel(fmt, j)
    end = fmt.latent if first < fmt.latent else fmt.head_dim
    return min(part_width(fmt), end - first)


@triton.constexpr_function
def padded_part(fmt: ExactFormat | PageFormat, j: int) -> int:
    """Channels of the tile of part j: a power of two, 16 at least."""
    return max(16, triton.next_power_of_2(part_channels(fmt, j)))


@triton.jit
def load_query(p_q, m_c, j: tl.constexpr, FMT: tl.constexpr):
    """Part j of q: [C, channels]. Loaded as it is multiplied: else it would wait in registers."""
    o_d = tl.arange(0, padded_part(FMT, j))
    m_q = m_c[:, None] & (o_d < part_channels(FMT, j))[None, :]
    p = p_q[:, None] + (first_channel(FMT, j) + o_d)[None, :]
    return tl.load(p, mask=m_q, other=0.0)


@triton.jit
def load_ids(row_ptr, i_tile, width, FMT: tl.constexpr):
    """The page ids of a tile; beyond the table the last one again."""
    if is_codes(FMT):
        return (tl.load(row_ptr + tl.minimum(i_tile, width - 1)),)
    else:
        return load_pages(row_ptr, i_tile, width, FMT)


@triton.constexpr_function
def is_codes(fmt: ExactFormat | PageFormat) -> bool:
    """Whether pages hold codes."""
    return isinstance(fmt, PageFormat)


@triton.jit
def softmax_rows(s, m, l, CAP: tl.constexpr):
    """As `tiles.softmax_step`, of rows.

    s: [C, T] fp32 in log2 units; m, l: [C], l times 2**P_BIAS
    """
    if CAP > 0:
        b_tanh = 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 / CAP)))
        s = tl.where(s > float("-inf"), b_tanh * (CAP * 1.4426950408889634), s)
    m_new = tl.maximum(m, tl.max(s, 1))
    decay = tl.exp2(m - m_new)
    p = tl.exp2(s - (m_new - P_BIAS)[:, None])
    return p, decay, m_new, l * decay + tl.sum(p, 1)


@triton.jit
def load_part(items_ptr, pages, base, segment, j: tl.constexpr, VIEW: tl.constexpr):
    """Part j of a tile as an operand: [T, channels].

    items_ptr: of int16 for codes, else of the items of raw pages
    pages:     from `load_ids`
    segment:   int16 pointer to the block of the segment of codes
    """
    FMT: tl.constexpr = VIEW.fmt
    if VIEW.codes:
        block = items_ptr + tl.multiple_of(pages[0].to(tl.int64) * 64 + base // 2, 8)
        b_x = decode_part(block, segment, j, FMT, VIEW.unpack_mode)
    else:
        p_rows = rows_of(items_ptr, pages, base, FMT)
        o_d = tl.arange(0, padded_part(FMT, j))
        COUNT: tl.constexpr = part_channels(FMT, j)
        p_x = p_rows[:, None] + (first_channel(FMT, j) + o_d)[None, :]
        m_x = tl.broadcast_to((o_d < COUNT)[None, :], p_x.shape)
        b_x = load_tile(p_x, m_x, COUNT == o_d.shape[0])
        if b_x.dtype == tl.bfloat16:
            b_x = tl.clamp(b_x.to(tl.float32), -LARGEST, LARGEST)
    return b_x.to(tl.float16)


@triton.jit
def rows_of(items_ptr, pages, base, FMT: tl.constexpr):
    """Pointers to the tokens of raw pages, one after another: [T]."""
    o_t = tl.arange(0, STRIP * len(pages))
    page = tl.full(o_t.shape, 0, tl.int32) + pages[0]
    for j in tl.static_range(1, len(pages)):
        page = tl.where(o_t // STRIP == j, pages[j], page)
    SIZE: tl.constexpr = items_ptr.dtype.element_ty.primitive_bitwidth // 8
    o_slot = o_t % STRIP * FMT.head_dim + (base + FMT.k) // SIZE
    return items_ptr + tl.multiple_of(
        page.to(tl.int64) * (128 // SIZE) + o_slot, 16 // SIZE
    )


@triton.jit
def decode_part(
    block, segment, j: tl.constexpr, FMT: tl.constexpr, UNPACK_MODE: tl.constexpr
):
    """Part j of a page of codes, halved: fp16 [T, channels].

    block, segment: int16 pointers
    """
    SIDE: tl.constexpr = FMT.k
    FIELDS: tl.constexpr = FMT.k.fields
    COUNT: tl.constexpr = part_channels(FMT, j)
    o_d = tl.arange(0, padded_part(FMT, j))
    o_c = first_channel(FMT, j) + o_d
    words = load_words(block, o_c, o_d < COUNT, COUNT == o_d.shape[0], SIDE)
    home = segment if SIDE.scale.shared else block
    fields = ()
    for f in tl.static_range(FIELDS):
        b_scale, b_shift = scales_of(home, f, o_c, o_d < COUNT, SIDE)
        b_codes = codes_of(words, f, 0, SIDE, UNPACK_MODE).to(tl.float32)
        b_scale = b_scale * weight_of(f, SIDE, UNPACK_MODE)
        fields = fields + ((b_codes * b_scale + b_shift).to(tl.float16),)
    return stack(fields, FIELDS)


@triton.jit
def load_words(block, o_c, m_c, WHOLE: tl.constexpr, SIDE: tl.constexpr):
    """Code words of channels o_c: int16 [T / fields, channels]; of float8 the bytes.

    Of a channel in the upper half of its words, that half is moved down.
    """
    R: tl.constexpr = SIDE.rows // SIDE.fields
    COLUMNS: tl.constexpr = SIDE.columns // SIDE.halves
    TYPE: tl.constexpr = tl.int8 if SIDE.floating else tl.int16
    p_words = (block + SIDE.codes // 2).to(tl.pointer_type(TYPE), bitcast=True)
    p_words = p_words + tl.arange(0, R)[:, None] * COLUMNS + (o_c % COLUMNS)[None, :]
    words = load_tile(p_words, tl.broadcast_to(m_c[None, :], p_words.shape), WHOLE)
    if SIDE.halves == 2:
        words = words >> (o_c // COLUMNS * 8).to(tl.int16)[None, :]
    return words


@triton.jit
def scales_of(home, f: tl.constexpr, o_c, m_c, SIDE: tl.constexpr):
    """What codes of field f are multiplied by, and what is added then, halved: fp32.

    [rows of the field, channels o_c], or one row or column that all share.

    home: int16 pointer to the block that has the scales
    """
    R: tl.constexpr = SIDE.rows // SIDE.fields
    if SIDE.scale.by == "block":
        p_scale = (home + SIDE.scale.scale // 2).to(
            tl.pointer_type(tl.float32), bitcast=True
        )
        b_scale = tl.full([1, 1], 0.0, tl.float32) + tl.load(p_scale) * HALF
        return b_scale, b_scale * SIDE.scale.center
    else:
        o_r = f * R + tl.arange(0, R)
        GROUP: tl.constexpr = min(SIDE.scale.group, o_c.shape[0])
        if SIDE.scale.by == "column":
            o_scale = (f * R // SIDE.scale.group * SIDE.columns + o_c)[None, :]
            m_scale = m_c[None, :]
        elif SIDE.scale.group == SIDE.columns:
            o_scale = o_r[:, None]
            m_scale = o_scale >= 0
        else:  # one of each group: with one of each channel all would wait in shared memory
            o_c = tl.min(tl.reshape(o_c, [o_c.shape[0] // GROUP, GROUP]), 1)
            o_scale = (o_c // SIDE.scale.group * SIDE.rows)[None, :] + o_r[:, None]
            m_scale = tl.broadcast_to((o_c < SIDE.columns)[None, :], o_scale.shape)
        p_scale = as_scales(home, SIDE.scale.scale) + o_scale
        b_scale = tl.load(p_scale, mask=m_scale, other=0.0).to(tl.float32) * HALF
        b_shift = b_scale * SIDE.scale.center
        if SIDE.scale.zero is not None:
            p_zero = as_scales(home, SIDE.scale.zero) + o_scale
            b_shift = b_scale * tl.load(p_zero, mask=m_scale, other=0.0).to(tl.float32)
        if SIDE.scale.by == "row" and SIDE.scale.group < SIDE.columns:
            b_scale = repeat_columns(b_scale, GROUP)
            b_shift = repeat_columns(b_shift, GROUP)
        return b_scale, b_shift


@triton.jit
def repeat_columns(x, COUNT: tl.constexpr):
    """[R, G] -> [R, G * COUNT]: each column COUNT times."""
    x = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], COUNT])
    return tl.reshape(x, [x.shape[0], x.shape[1] * COUNT])


@triton.jit(do_not_specialize=["heads", "queries", "stride_b", "stride_m", "stride_h"])
def scale_query_kernel(
    q_ptr,
    o_ptr,
    heads,
    queries,
    stride_b,
    stride_m,
    stride_h,
    stride_o,
    D: tl.constexpr,
):
    """One row of `scale_query`."""
    i_row = tl.program_id(0)
    i_head = i_row % heads
    i_m = i_row // heads % queries
    i_b = i_row // heads // queries
    o_d = tl.arange(0, triton.next_power_of_2(D))
    o_q = i_b.to(tl.int64) * stride_b + i_m.to(tl.int64) * stride_m
    p_q = q_ptr + o_q + i_head.to(tl.int64) * stride_h + o_d
    b_q = tl.load(p_q, mask=o_d < D, other=0.0).to(tl.float32)
    unit = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(b_q), 0), 1e-30))))
    p_o = o_ptr + i_row.to(tl.int64) * stride_o
    tl.store(p_o + o_d, (b_q / unit).to(tl.float16), mask=o_d < D)
    p_unit = (p_o + D).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(p_unit, unit * 1.4426950408889634)


def scale_query(q: Tensor) -> Tensor:
    """q [B, M, Hq, D] in fp16, each row divided by a power of two, so that none is above 1.

    Behind a row of D items is what its scores are multiplied by, in fp32, to be q.k in log2 units.
    Once for all units, and in memory, from where tensor cores can have it in shared memory.

    returns: [B, M, Hq, D + 8] fp16
    """
    batch, queries, heads, head_dim = q.shape
    scaled = torch.empty(
        batch, queries, heads, head_dim + 8, dtype=torch.float16, device=q.device
    )
    scale_query_kernel[(batch * queries * heads,)](
        q, scaled, heads, queries, *q.stride()[:3], scaled.stride(2), head_dim,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return scaled
