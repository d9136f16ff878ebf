"""The Triton kernel on pages made of pieces against exact attention on what they stand for."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import paged_pieces, reduce
from disagg.kernels.formats_paged import LowRank, PagedFormat, Rotation, Scale, Side, Sparse
from disagg.kernels.reference_encode_paged import encode_paged
from disagg.kernels.reference_paged import attend_paged, decode_paged
from disagg.kernels.reference_pages import store_blocks
from tests.kernels.cases import BASE, Case, exact_attention, place, random_kv, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 64
SEGMENT_BASE = 16


class Planes:
    """Offsets handed out one after another, each on 16 bytes."""

    def __init__(self):
        self.end = 0

    def take(self, nbytes: int) -> int:
        at, self.end = self.end, self.end + -(-nbytes // 16) * 16
        return at


def make_format(
    head_dim=64, bits=2, k_by="column", v_by="column", group=64, zero=True, k_shared=False,
    rank=0, slots=0, block=0, floating=False, valid=False,
) -> PagedFormat:  # fmt: skip
    page, segment = Planes(), Planes()
    sides = []
    for name, by, rows, columns in (("k", k_by, T, head_dim), ("v", v_by, head_dim, T)):
        shared = name == "k" and k_shared
        over = {"column": rows, "row": columns, "block": 1}[by]
        size = over if shared else min(group, over)
        count = {"column": over // size * columns, "row": over // size * rows, "block": 2}[by]
        there = segment if shared else page
        scale = Scale(
            by=by,
            group=size,
            scale=there.take(2 * count),
            zero=there.take(2 * count) if zero else None,
            center=0 if floating else -(1 << (bits - 1)),
            shared=shared,
        )
        side = Side(rows, columns, bits, page.take(rows * columns * bits // 8), scale)
        low = LowRank(rank, page.take(2 * T * rank), segment.take(2 * head_dim * rank))
        sparse = Sparse(
            slots, page.take(columns * slots), page.take(2 * columns * slots), slots % 2 == 0
        )
        turn = Rotation(block, segment.take(2 * block * block))
        side = replace(
            side,
            low_rank=low if rank else None,
            sparse=sparse if slots else None,
            rotation=turn if block else None,
            floating=floating,
        )
        sides.append(side)
    mask = page.take(T // 8) if valid else None
    return PagedFormat(T, head_dim, page.end, segment.end, sides[0], sides[1], mask)


FORMATS = {
    "kivi": {"group": 32},
    "pertoken": {"bits": 4, "k_by": "row", "group": 32},
    "pertoken-2bit": {"head_dim": 128, "k_by": "row"},
    "kcvt": {"bits": 4, "k_shared": True, "head_dim": 80, "group": 80},
    "int8": {"bits": 8, "k_by": "row", "zero": False},
    "fp8": {"bits": 8, "k_by": "block", "v_by": "block", "zero": False, "floating": True},
    "gear-l": {"rank": 4, "head_dim": 128},
    "gear-l-shared": {"rank": 3, "bits": 4, "k_shared": True},
    "gear": {"rank": 2, "slots": 2, "group": 32},
    "gear-4bit": {"rank": 2, "slots": 1, "bits": 4},
    "gear-odd": {"rank": 3, "slots": 3, "bits": 4},
    "decoquant": {"bits": 4, "k_by": "row", "block": 16},
    "decoquant-2bit": {"k_by": "row", "block": 8},
    "ott": {"group": 32, "valid": True},
}


def make_case(fmt: PagedFormat, lengths: list[int], heads: int, width: int, run: int, loud=1.0):
    """Sequences whose pages are cut into segments of `run` pages; what hides in K' is not there.

    loud: what channel 5 of V is multiplied by in one token of 8
    """
    k, v = random_kv(lengths, heads, fmt.head_dim, T)
    v[..., 3::8, 5] *= loud
    count = k.shape[2] // T
    blocks, shared = [], []
    for row in range(len(lengths)):
        for page in range(0, count, run):
            part = slice(page * T, min(page + run, count) * T)
            found, segment = encode_paged(k[row, :, part], v[row, :, part], fmt, seed=page)
            blocks.append(found)
            shared.append(segment)
    blocks = torch.cat(blocks).unflatten(0, (len(lengths), count))
    if fmt.valid is not None:
        bits = torch.randint(0, 256, (*blocks.shape[:3], T // 8), dtype=torch.uint8)
        blocks[..., fmt.valid : fmt.valid + T // 8] = bits
    arena, pages = place(blocks)
    segments = owner = owned = None
    if fmt.segment_bytes:
        stack = torch.stack(shared)
        stride = -(-(SEGMENT_BASE + stack[0].numel()) // 128)
        ids = (torch.arange(stack.shape[0]).flip(0) * stride + arena.numel() // 128).int()
        arena = torch.cat([arena, torch.zeros((stack.shape[0] + 1) * stride * 128).byte()])
        store_blocks(arena, stack, ids, SEGMENT_BASE)
        segments = ids.view(len(lengths), -1)
        owner = (torch.arange(count) // run).int().repeat(len(lengths), 1)
        owned = stack.unflatten(0, (len(lengths), -1)).repeat_interleave(run, 1)[:, :count]
    found = decode_paged(blocks, owned, fmt)
    exact = [x.transpose(1, 2).flatten(2, 3) for x in found]
    hi = torch.tensor(lengths).int()[:, None]
    q = torch.randn(len(lengths), 1, heads * width, fmt.head_dim)
    for row, n in enumerate(lengths):
        used = max(1, -(-n // T))
        pages[row, used:] = pages[row, 0]
        if owner is not None:
            owner[row, used:] = 0
    case = Case(q, arena, pages.contiguous(), torch.zeros_like(hi), hi, exact[0], exact[1])
    return case, segments, owner


def check(fmt: PagedFormat, lengths: list[int], heads: int = 2, width: int = 4, run: int = 2):
    torch.manual_seed(7)
    case, segments, owner = make_case(fmt, lengths, heads, width, run)
    tensors = [x.to(DEVICE) for x in (case.q, case.arena, case.pages, case.lo, case.hi)]
    more = [None if x is None else x.to(DEVICE) for x in (segments, owner)]
    assert paged_pieces.is_supported(fmt)
    part = paged_pieces.attend_paged(*tensors, fmt, BASE, heads, 0.2, *more, SEGMENT_BASE)
    o, lse = reduce.join([part])
    exact, exact_lse = exact_attention(case, 0.2)
    if fmt.valid is not None:  # the reference is held against such masks in tests/codecs
        tables = case.arena, case.pages, case.lo, case.hi
        exact, exact_lse = attend_paged(case.q.double(), *tables, fmt, BASE, heads, 0.2)
    seen = exact_lse > -torch.inf
    assert torch.equal(lse.cpu() > -torch.inf, seen)
    assert torch.allclose(lse.cpu()[seen].double(), exact_lse[seen], rtol=1e-3, atol=2e-3)
    assert relative_error(o.cpu(), exact) <= 1e-3
    assert not o.cpu()[~seen].any()


@pytest.mark.parametrize("name", FORMATS)
def test_attention_on_pieces_equals_exact_attention(name):
    heads = 2 if name in ("kivi", "int8", "gear-l-shared") else 1
    check(make_format(**FORMATS[name]), [140, 1], heads=heads, width=3, run=1)


@pytest.mark.parametrize(("name", "width"), [("gear-l", 1), ("gear-l-shared", 7), ("int8", 16)])
def test_any_number_of_query_heads_reads_one_kv_head(name, width):
    check(make_format(**FORMATS[name]), [70, 63], heads=1, width=width)


def test_units_of_work_stay_within_segments_of_any_length():
    fmt = make_format(rank=2)
    check(fmt, [390, 70, 0], heads=1, run=3)
    check(fmt, [130], heads=1, run=1)


def test_formats_that_do_not_fit_its_tiles_are_left_to_the_reference():
    for odd in ({"v_by": "row"}, {"block": 64}, {"block": 16, "rank": 2}, {"rank": 32}):
        assert not paged_pieces.is_supported(make_format(**odd))


def test_outliers_that_fp16_holds_only_alone_are_not_lost():
    torch.manual_seed(7)
    fmt = make_format(slots=2)
    case, _, _ = make_case(fmt, [130], 1, 2, 1, loud=5e3)
    tensors = [x.to(DEVICE) for x in (case.q, case.arena, case.pages, case.lo, case.hi)]
    o = reduce.merge([paged_pieces.attend_paged(*tensors, fmt, BASE, 1, 0.02)])
    assert relative_error(o.cpu(), exact_attention(case, 0.02)[0]) <= 1e-3


def test_queries_and_factors_that_overflow_fp16_together_do_not():
    fmt = make_format(rank=2)
    case, segments, owner = make_case(fmt, [200], 1, 2, 2)
    case = replace(case, q=case.q * 300)
    tensors = [x.to(DEVICE) for x in (case.q, case.arena, case.pages, case.lo, case.hi)]
    more = segments.to(DEVICE), owner.to(DEVICE), SEGMENT_BASE
    o = reduce.merge([paged_pieces.attend_paged(*tensors, fmt, BASE, 1, 0.2, *more)])
    assert relative_error(o.cpu(), exact_attention(case, 0.2)[0]) <= 5e-3


def test_a_basis_whose_product_with_q_overflows_fp16_loses_nothing():
    fmt = make_format(rank=2, head_dim=128)
    case, segments, owner = make_case(fmt, [200], 1, 2, 4)
    large, low = 2.0**14, fmt.k.low_rank
    at = int(segments[0, 0]) * 128 + SEGMENT_BASE + low.b
    b = case.arena[at : at + 4 * 128].view(torch.float16)
    b *= large
    for page in set(case.pages[0].tolist()):
        at = page * 128 + BASE + low.a
        case.arena[at : at + 4 * T].view(torch.float16).mul_(1 / large)
    signs = b.view(128, 2)[:, 0].float().sign()
    assert b.isfinite().all()
    assert signs @ b.view(128, 2)[:, 0].float() > 65504
    case = replace(case, q=signs.expand_as(case.q).contiguous())
    tensors = [x.to(DEVICE) for x in (case.q, case.arena, case.pages, case.lo, case.hi)]
    more = segments.to(DEVICE), owner.to(DEVICE), SEGMENT_BASE
    o = reduce.merge([paged_pieces.attend_paged(*tensors, fmt, BASE, 1, 0.05, *more)])
    assert relative_error(o.cpu(), exact_attention(case, 0.05)[0]) <= 5e-3
