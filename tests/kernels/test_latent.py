"""Latents in Triton: attention against the reference, and the bytes that it writes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from disagg.kernels import ops
from disagg.kernels.formats import ExactFormat, PageFormat
from disagg.kernels.gpu import append as gpu_append
from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu import encode as gpu_encode
from disagg.kernels.gpu import plan
from disagg.kernels.gpu.combine import merge
from disagg.kernels.reference import encode as reference
from disagg.kernels.sealing import NewRows, Sealing, SealRows, Segmentation
from tests.kernels import cases
from tests.kernels.cases import DEVICE, int32

CPU = torch.device("cpu")
DEEPSEEK = {"head_dim": 576, "latent": 512}
FORMATS = {
    "kivi-4bit": {"bits": 4},
    "kivi-2bit": {},
    "pertoken-4bit": {"bits": 4, "k_by": "row"},
    "pertoken-2bit": {"k_by": "row"},
    "int8": {
        "bits": 8,
        "k_by": "row",
        "zero": False,
        "group": 576,
    },
    "fp8": cases.FORMATS["fp8"],
    "kcvt": {"bits": 4, "k_shared": True},
}
RAW_DTYPES = ("float16", "bfloat16")
LARGE = {
    name: cases.make_format(**options | DEEPSEEK) for name, options in FORMATS.items()
}
LARGE |= {f"raw-{dtype}": cases.raw_format(dtype, 576, 512) for dtype in RAW_DTYPES}
LATENTS = {name: cases.latent_format(name) for name in cases.LATENTS}
LATENTS |= {f"raw-{dtype}": cases.raw_format(dtype, 96, 80) for dtype in RAW_DTYPES}
SERVED = [name for name, fmt in LATENTS.items() if ops.serves_gpu(fmt)]


def check(case: cases.Case, cap: float = 0.0) -> None:
    """Attention of Triton, within 1e-3."""
    expected = cases.exact_attention(case, 0.1, cap)
    q, view = case.on(DEVICE)

    o, lse = merge(gpu.attend(q, [view], 0.1, None, cap))

    answer = (o.cpu(), lse.cpu())
    cases.assert_alike(answer, expected, tolerance=1e-3, near=2e-3, rtol=1e-3)


def one_head(
    fmt: PageFormat | ExactFormat, lengths: list[int], width: int, m: int = 1
) -> cases.Case:
    """A case of one KV head."""
    return cases.make_case(
        fmt,
        lengths,
        heads=1,
        width=width,
        m=m,
    )


def small_format(name: str) -> PageFormat | ExactFormat:
    """48 channels, 32 of them the latent."""
    if name == "raw":
        return cases.raw_format("bfloat16", 48, 32)
    return cases.make_format(
        **FORMATS[name] | {"head_dim": 48, "latent": 32, "group": 16}
    )


@pytest.mark.parametrize("name", ["raw", "pertoken-2bit"])
def test_a_tile_is_read_once_for_both_products(name):
    fmt = small_format(name)
    case = one_head(fmt, [70, 0], width=3)

    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("name", SERVED)
def test_latents_are_attended_as_what_they_hold(name, cap):
    case = cases.make_case(
        LATENTS[name],
        lengths=[140, 1],
        heads=1,
        width=5,
        m=2,
    )

    check(case, cap)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_latents_of_512_channels_are_attended(name):
    case = one_head(LARGE[name], [70], width=20)

    check(case)


@pytest.mark.slow
def test_programs_of_64_rows_share_more_query_heads():
    fmt = small_format("raw")
    case = one_head(fmt, [100], width=70)

    check(case)


@pytest.mark.slow
def test_queries_see_what_their_windows_show():
    fmt = small_format("kivi-4bit")
    case = one_head(fmt, [170, 90], width=2, m=2)
    lo = int32([131, 132], [64, 65])

    check(case.seeing(lo=lo))


@pytest.mark.slow
def test_loud_queries_lose_nothing():
    fmt = small_format("kivi-2bit")
    case = one_head(fmt, [70], width=2)
    loud = replace(case, q=case.q * 300)

    check(loud)


def test_latents_of_several_kv_heads_are_refused():
    case = cases.make_case(small_format("raw"), lengths=[20], heads=2, width=1)
    q, view = case.on(DEVICE)

    with pytest.raises(ValueError, match="2 KV heads of latents; expected 1"):
        gpu.attend(q, [view], 0.1)


@pytest.mark.parametrize(
    "fmt",
    [
        cases.raw_format("float32", 96, 80),
        cases.raw_format("float16", 1088, 1024),
        cases.latent_format("kivi-T128"),
        cases.make_format(head_dim=144, latent=120, k_by="row", group=24, bits=8),
    ],
    ids=["fp32", "too wide", "tall pages", "odd groups"],
)
def test_what_triton_does_not_serve_is_left_to_the_reference(fmt):
    assert not ops.serves_gpu(fmt)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_chips_without_room_leave_latents_to_the_reference(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    cuda = torch.device("cuda")

    served = ops.serves_gpu(cases.raw_format("float16", 576, 512), cuda)

    assert served == (capability == (9, 0))
    assert ops.serves_gpu(cases.raw_format("float16", 64), cuda)


def test_units_are_fewer_where_programs_share_them(monkeypatch):
    span = plan.Span(
        plan.Tile(64, 4096, warps=8),
        lo=np.array([0]),
        hi=np.array([64 * 100]),
        most=64 * 100,
    )
    monkeypatch.setattr(plan, "count_processors", lambda _: 8)

    alone, _ = plan.units_of_spans([span], 1, CPU)
    shared, _ = plan.units_of_spans([span], 2, CPU)

    assert len(alone) == 8
    assert len(shared) == 4


def test_rows_of_a_wide_page_are_shared_by_programs():
    check_bytes(LARGE["int8"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMATS])
def test_bytes_of_pages_are_those_of_the_reference(name):
    check_bytes(LARGE[name])
    check_bytes(small_format(name))


def check_bytes(fmt: PageFormat) -> None:
    """What an encoder of Triton writes, and an append that seals a page."""
    k, _ = cases.sequence_kv(64, 1, fmt.head_dim, torch.float16)
    cut = Segmentation()
    expected, expected_segments = reference.encode(k, None, fmt, cut)

    blocks, segments = gpu_encode.encode(k.to(DEVICE), None, fmt, cut)

    assert torch.equal(blocks.cpu(), expected)
    if expected_segments is not None:
        assert torch.equal(segments.cpu(), expected_segments)
    if fmt.is_sealable:
        check_append(fmt, k)


def check_append(fmt: PageFormat, k: torch.Tensor) -> None:
    """The last token of a page is appended, and seals it."""
    raw = cases.raw_format("float16", fmt.head_dim, fmt.latent)
    page_units = -(-(cases.BASE + raw.block_bytes) // 128)
    pages = [3 + page_units * i for i in range(4)]
    sealed = 3 + page_units * 4
    arena = torch.zeros((sealed + page_units * 4 + 9) * 128, dtype=torch.uint8)
    tokens = k.transpose(0, 1)
    for i in range(63):
        row = new_row(pages[i // 16], i % 16, raw, "cpu")
        reference.append(arena, tokens[i : i + 1], None, row)
    actual = arena.to(DEVICE, copy=True)
    last = tokens[63:]

    reference.append(
        arena,
        last,
        None,
        new_row(pages[3], 15, raw, "cpu"),
        sealing_of(fmt, sealed, pages, "cpu"),
    )
    gpu_append.append(
        actual,
        last.to(DEVICE),
        None,
        new_row(pages[3], 15, raw, DEVICE),
        sealing_of(fmt, sealed, pages, DEVICE),
    )

    assert torch.equal(actual.cpu(), arena)
    assert arena[sealed * 128 :].any()


def new_row(page: int, slot: int, raw: ExactFormat, device: str) -> NewRows:
    return NewRows(
        int32(page).to(device),
        int32(slot).to(device),
        raw,
        cases.BASE,
    )


def sealing_of(fmt: PageFormat, page: int, tails: list[int], device: str) -> Sealing:
    none = int32(0).to(device)
    rows = SealRows(
        pages=int32(page).to(device),
        tails=int32(tails).to(device),
        segments=none,
        stretches=none,
    )
    return Sealing(rows, fmt, base=32)
