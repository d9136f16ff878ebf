"""What sparse slots add to the sums of one page: a scatter that the tensor cores do.

A slot says that x[r, c] is off by delta. Contracted with a vector q over the columns it adds
delta * q[c] to row r, and many slots may name one row. As a matrix product it is

    sums[r] = hot [rows, columns] @ (delta * q),    hot[r, c] = 1 where the slot of c names row r

and hot is nearly free: a row number, read as fp16, is a subnormal, so that one instruction compares
two pairs of them and leaves 1.0 or 0 where the tensor core wants its operand. Rows are cut into
their planes, so one hot matrix of a plane serves all: r = f * W + w, and the plane f goes with q.

    sums_f[w] = (w == r[c] % W) @ (delta * q * (f == r[c] // W))

Where columns of q are repeated to fill the tensor core, each of the copies takes a plane.
"""

import triton
import triton.language as tl

from disagg.kernels.tiles import as_bytes, as_scales, in_halves

BOTH = tl.constexpr(0x10001)  # times a small number: that number in both halves of a register


@triton.jit
def sparse_places(lo_ptr, FMT: tl.constexpr, SHAPE: tl.constexpr):
    """What rows are compared with, made once before the pages; () without sparse slots.

    Row numbers of a plane of K [W, 1] and of V [W, 1], times BOTH; which copy a column is [1, C]
    """
    if FMT.k.sparse is None and FMT.v.sparse is None:
        return ()
    else:
        k_rows = count_up(lo_ptr, FMT.k.rows // FMT.k.planes)[:, None]
        v_rows = count_up(lo_ptr, FMT.v.rows // FMT.v.planes)[:, None]
        copy = count_up(lo_ptr, SHAPE.columns * SHAPE.copies)[None, :] % SHAPE.copies
        return (k_rows * BOTH, v_rows * BOTH, copy)


@triton.jit
def count_up(lo_ptr, COUNT: tl.constexpr):
    """0 .. COUNT-1 [COUNT] int32, without tl.arange as far as the compiler can see.

    It computes a tensor-core operand in place only if all that it is made of is loaded, and builds
    it in shared memory otherwise, at twice the instructions (Triton 3.9, 2026-11). Hence the
    numbers from `lo`, none of which is negative; and 4 of each, as it looks through small loads.
    """
    o_n, o_copy = tl.arange(0, COUNT)[:, None], tl.arange(0, 4)[None, :]
    zero = tl.load(lo_ptr + (o_n + o_copy) * 0) >> 31
    pairs = tl.split(tl.reshape(o_n + zero, [COUNT, 2, 2]))[0]
    return tl.split(pairs)[0]


@triton.jit
def sparse_sums(
    block, x, rows, copy, COPIES: tl.constexpr, SIDE: tl.constexpr, SPELLING: tl.constexpr
):
    """What the sparse slots of a side add to its rows: [W, C] fp32 for each of its planes.

    x:    fp16 for each half of the columns: what they are contracted with, [U, C * COPIES]
    rows: row numbers of a plane; copy: as `sparse_places` has it
    The rows of the slots of a column differ.
    """
    PLANES: tl.constexpr = SIDE.planes
    HALVES: tl.constexpr = SIDE.halves
    W: tl.constexpr = SIDE.rows // SIDE.planes
    SLOTS: tl.constexpr = SIDE.sparse.slots
    sums = ()
    for _ in tl.static_range(0, PLANES, COPIES):
        sums = sums + (tl.zeros([W, x[0].shape[1]], tl.float32),)
    deltas = load_deltas(block, SIDE)
    for slot in tl.static_range(SLOTS):
        b_row = in_halves(load_rows(block, slot, SIDE, SPELLING)[:, None], HALVES)
        b_delta = in_halves(deltas[slot][:, None], HALVES)
        for j in tl.static_range(HALVES):
            b_hot = equals(tl.trans(masked(b_row[j], W - 1, SPELLING)), rows, SPELLING)
            b_x = x[j] * b_delta[j]
            b_plane = masked(b_row[j], (PLANES - 1) * W, SPELLING)
            added = ()
            for f in tl.static_range(0, PLANES, COPIES):
                b_own = b_x * equals(b_plane, (copy + f) * (W * BOTH), SPELLING)
                added = added + (tl.dot(b_hot, b_own, sums[f // COPIES]),)
            sums = added
    return by_plane(sums, COPIES)


@triton.jit
def by_plane(sums, COPIES: tl.constexpr):
    """[W, C * COPIES] for every COPIES planes -> [W, C] for each. Registers are renamed."""
    if COPIES == 1:
        return sums
    else:
        planes = ()
        for i in tl.static_range(len(sums)):
            planes = planes + tl.split(
                tl.reshape(sums[i], [sums[i].shape[0], sums[i].shape[1] // 2, 2])
            )
        return planes


@triton.jit
def load_deltas(block, SIDE: tl.constexpr):
    """The deltas of each slot: [columns] fp16."""
    SLOTS: tl.constexpr = SIDE.sparse.slots
    o_c = tl.arange(0, SIDE.columns) * SLOTS
    p_delta = as_scales(block, SIDE.sparse.delta)
    if SLOTS == 2:  # loaded ahead, which single items 4 bytes apart are not
        return tl.split(tl.load(p_delta + o_c[:, None] + tl.arange(0, 2)[None, :]))
    else:
        deltas = ()
        for slot in tl.static_range(SLOTS):
            deltas = deltas + (tl.load(p_delta + o_c + slot),)
        return deltas


@triton.jit
def load_rows(block, slot: tl.constexpr, SIDE: tl.constexpr, SPELLING: tl.constexpr):
    """The rows of one slot of all columns: [columns] int16, with garbage from bit 8 up.

    Bytes would be loaded one by one, and give the operand another layout than the codes have; so a
    word brings the slots of two columns, and one PRMT gives each its half.
    """
    SLOTS: tl.constexpr = SIDE.sparse.slots
    U: tl.constexpr = SIDE.columns
    if SPELLING != "ptx" or SLOTS > 2:
        p_index = as_bytes(block, SIDE.sparse.index) + tl.arange(0, U) * SLOTS
        return tl.load(p_index + slot).to(tl.int16)
    else:
        word: tl.constexpr = tl.uint16 if SLOTS == 1 else tl.uint32
        p_word = (block + SIDE.sparse.index // 2).to(tl.pointer_type(word), bitcast=True)
        b_word = tl.load(p_word + tl.arange(0, U // 2)).to(tl.uint32)
        b_word = tl.reshape(tl.broadcast_to(b_word[:, None], [U // 2, 2]), [U])
        if SLOTS == 1:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x4140;", "=r,r,r", [b_word], tl.int16, is_pure=True, pack=2
            )
        elif slot == 0:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x4240;", "=r,r,r", [b_word], tl.int16, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x4341;", "=r,r,r", [b_word], tl.int16, is_pure=True, pack=2
            )


@triton.jit
def masked(x, MASK: tl.constexpr, SPELLING: tl.constexpr):
    """int16 x & MASK."""
    mask = tl.full(x.shape, MASK, tl.int16)
    if SPELLING == "ptx":
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [x, mask], tl.int16, is_pure=True, pack=2
        )
    else:
        return x & mask


@triton.jit
def equals(x, y, SPELLING: tl.constexpr):
    """1.0 in fp16 where int16 x is the number that int32 y is BOTH times, else 0; broadcast."""
    x, y = tl.broadcast(x, y)
    if SPELLING == "ptx":
        return tl.inline_asm_elementwise(
            "set.eq.f16x2.f16x2 $0, $1, $2;", "=r,r,r,r", [x, y], tl.float16, is_pure=True, pack=2
        )
    else:
        return (x == (y & 0xFFFF)).to(tl.float16)
