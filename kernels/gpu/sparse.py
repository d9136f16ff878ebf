"""Sparse slots of one page, added to its sums: a scatter on tensor cores.

A slot says that x[r, c] is off by delta. Contracted with a vector q over the columns it adds
delta * q[c] to row r, and many slots may name one row. As a matrix product it is

    sums[r] = hot [rows, columns] @ (delta * q),    hot[r, c] = 1 where the slot of c names row r

and hot is nearly free: a row number, read as fp16, is a subnormal, so that one instruction compares
two pairs of them and leaves 1.0 or 0 where the tensor core wants its operand. Rows may be cut into
equal parts, so that one hot matrix of a part serves all: r = f * W + w, and the part f goes with q.

    sums_f[w] = (w == r[c] % W) @ (delta * q * (f == r[c] // W))

Where columns of q are repeated to fill the tensor core, each of the copies takes a part. K has one
part for each copy, so without copies its rows are not cut; V has its fields.
"""

import triton
import triton.language as tl

from disagg.kernels.gpu.tiles import as_bytes, as_scales, in_halves

BOTH = tl.constexpr(
    0x10001
)  # times a small number: that number in both halves of a register


@triton.jit
def sparse_rows(lo_ptr, FMT: tl.constexpr, SHAPE: tl.constexpr):
    """Row numbers to compare slots with, built once per unit; () without sparse slots.

    Row numbers of a part of K [W, 1] and of V [W, 1]; which copy a column is [1, C]; all int16
    """
    if FMT.k.sparse is None and FMT.v.sparse is None:
        return ()
    else:
        k_rows = count_up(lo_ptr, FMT.k.rows // SHAPE.copies)[:, None]
        v_rows = count_up(lo_ptr, FMT.v.rows // FMT.v.fields)[:, None]
        copy = count_up(lo_ptr, SHAPE.columns * SHAPE.copies)[None, :] % SHAPE.copies
        return (k_rows, v_rows, copy)


@triton.jit
def count_up(lo_ptr, COUNT: tl.constexpr):
    """0 .. COUNT-1 [COUNT] int16, without tl.arange as far as the compiler can see.

    It computes a tensor-core operand in place only if all that it is made of is loaded, and builds
    it in shared memory otherwise, at twice the instructions (Triton 3.9, 2026-11). Hence the
    numbers from `lo`, none of which is negative; and 4 of each, as it looks through small loads.
    """
    o_n = tl.arange(0, COUNT)[:, None]
    o_copy = tl.arange(0, 4)[None, :]
    zero = tl.load(lo_ptr + (o_n + o_copy) * 0) >> 31
    pairs = tl.split(tl.reshape(o_n + zero, [COUNT, 2, 2]))[0]
    return tl.split(pairs)[0].to(tl.int16)


@triton.jit
def sparse_sums(
    block, x, sums, rows, copy,
    PARTS: tl.constexpr, COPIES: tl.constexpr, SIDE: tl.constexpr, UNPACK_MODE: tl.constexpr,
):  # fmt: skip
    """The sparse slots of a side, summed into its rows: [W, C] fp32 for each part.

    x:    fp16 for each half of the columns: what they are contracted with, [U, C * COPIES]
    sums: what they are added to, [W, C * COPIES] fp32 for every COPIES parts; () for 0
    rows: row numbers of a part; copy: as `sparse_rows` has it
    The rows of the slots of a column differ.
    """
    HALVES: tl.constexpr = len(x)
    W: tl.constexpr = SIDE.rows // PARTS
    SLOTS: tl.constexpr = SIDE.sparse.slots
    tl.static_assert(PARTS % COPIES == 0, "each copy takes as many parts")
    if len(sums) == 0:
        for _ in tl.static_range(0, PARTS, COPIES):
            sums = sums + (tl.zeros([W, x[0].shape[1]], tl.float32),)
    deltas = load_deltas(block, SIDE)
    pairs = load_pairs(block, SIDE)
    for j in tl.static_range(HALVES):
        for slot in tl.static_range(SLOTS):
            b_pair = in_halves(pairs[slot][:, None], HALVES)[j]
            b_hot = equals(
                tl.trans(of_pairs(b_pair & (W - 1) * BOTH)), rows, UNPACK_MODE
            )
            b_x = x[j] * in_halves(deltas[slot][:, None], HALVES)[j]
            b_part = of_pairs(b_pair & (PARTS - 1) * W * BOTH)
            added = ()
            for f in tl.static_range(0, PARTS, COPIES):
                b_own = b_x
                if PARTS > 1:
                    b_own = b_x * equals(b_part, (copy + f) * W, UNPACK_MODE)
                added = added + (tl.dot(b_hot, b_own, sums[f // COPIES]),)
            sums = added
    return by_part(sums, COPIES)


@triton.jit
def by_part(sums, COPIES: tl.constexpr):
    """[W, C * COPIES] for every COPIES parts -> [W, C] for each. Registers are renamed."""
    if COPIES == 1:
        return sums
    else:
        parts = ()
        for i in tl.static_range(len(sums)):
            parts = parts + tl.split(
                tl.reshape(sums[i], [sums[i].shape[0], sums[i].shape[1] // 2, 2])
            )
        return parts


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
def load_pairs(block, SIDE: tl.constexpr):
    """The rows of each slot, two columns in one number: [columns / 2] int32.

    The row of an even column is at bit 0, that of the odd one next to it at bit 16; above each is
    garbage from bit 8 up. Bytes would be loaded one by one, and give the operand another layout
    than the codes have.
    """
    SLOTS: tl.constexpr = SIDE.sparse.slots
    o_pair = tl.arange(0, SIDE.columns // 2)
    pairs = ()
    if SLOTS > 2:
        p_index = as_bytes(block, SIDE.sparse.index) + o_pair * (2 * SLOTS)
        for slot in tl.static_range(SLOTS):
            b_odd = tl.load(p_index + SLOTS + slot).to(tl.int32)
            pairs = pairs + (tl.load(p_index + slot).to(tl.int32) | b_odd << 16,)
    else:
        word: tl.constexpr = tl.uint16 if SLOTS == 1 else tl.uint32
        p_word = (block + SIDE.sparse.index // 2).to(
            tl.pointer_type(word), bitcast=True
        )
        b_word = tl.load(p_word + o_pair).to(tl.int32)
        pairs = (b_word | b_word << 8,) if SLOTS == 1 else (b_word, b_word >> 8)
    return pairs


@triton.jit
def of_pairs(pairs):
    """int32 [U, 1] -> int16 [2 * U, 1]: the lower half of each, and its upper half below."""
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(tl.permute(both, (0, 2, 1)), [2 * pairs.shape[0], 1])


@triton.jit
def equals(x, y, UNPACK_MODE: tl.constexpr):
    """1.0 in fp16 where int16 x and y, neither negative, are equal, else 0; broadcast."""
    x, y = tl.broadcast(x, y)
    if UNPACK_MODE == "ptx":
        return tl.inline_asm_elementwise(
            "set.eq.f16x2.f16x2 $0, $1, $2;",
            "=r,r,r",
            [x, y],
            tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return (x == y).to(tl.float16)
