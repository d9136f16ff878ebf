"""Every kind of page, attended by everything that can, against exact attention in fp64 on what the
pages hold: the torch reference, each path of the C library, and Triton."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch

from disagg.kernels import ops
from disagg.kernels.cpu import attend as cpu
from disagg.kernels.cpu import library
from disagg.kernels.formats import ExactFormat, Format, latent_of
from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu.combine import merge
from disagg.kernels.reference import codes, exact
from disagg.kernels.view import Partial
from tests.kernels import cases

TRITON = "triton"
SMALL = {"lengths": [140, 1], "heads": 1, "run": 1}  # Triton's interpreter is slow
LARGE = {"lengths": [390, 70, 0, 700], "heads": 2, "run": 3}


@dataclass(frozen=True)
class Pages:
    """What is attended; width: query heads for each KV head; m: queries of a sequence."""

    fmt: Format
    width: int = 3
    m: int = 1


OF_EVERY_WIDTH = {
    "b2": {"v_group": 32},
    "b4": {"bits": 4, "head_dim": 96, "group": 32},
    "int8": cases.FORMATS["int8"],
}
PAGES = {
    name: Pages(cases.make_format(**options)) for name, options in cases.FORMATS.items()
}
PAGES |= {name: Pages(fmt, 4) for name, fmt in cases.SIZES.items()}
BANDS = {(b, dim): cases.banded_format(b, dim) for b, dim in cases.BANDED}
PAGES |= {
    f"banded-{b}-D{dim}": Pages(fmt, 3, 1 + b % 2) for (b, dim), fmt in BANDS.items()
}
PAGES |= {
    f"raw-{dtype}-D{dim}": Pages(cases.raw_format(dtype, dim), 7, 2)
    for dtype in ("float16", "bfloat16", "float32")
    for dim in (16, 64, 80, 256)
}
PAGES |= {
    f"{name}-for-{width}": Pages(cases.make_format(**options), width, 1 + (width == 16))
    for width in (1, 2, 4, 5, 7, 8, 16)
    for name, options in OF_EVERY_WIDTH.items()
}
PAGES |= {
    "gear-l-for-1": Pages(cases.named_format("gear-l"), 1),
    "gear-l-shared-for-7": Pages(cases.named_format("gear-l-shared"), 7),
}
PAGES |= {
    f"latent-{name}": Pages(cases.latent_format(name), 1 + 2 * i % 16)
    for i, name in enumerate(cases.LATENTS)
}
PAGES |= {
    f"latent-raw-{dtype}": Pages(cases.raw_format(dtype, 96, latent=80), 7, 2)
    for dtype in ("float16", "bfloat16", "float32")
}
MORE = (
    "banded-2-D128",
    "raw-float16-D80",
    "latent-pertoken-4bit",
    "latent-raw-bfloat16",
)


@pytest.fixture(params=[library.TORCH, *library.PATHS, TRITON])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param in (library.TORCH, TRITON):
        yield request.param
        return
    if request.param not in library.paths():
        pytest.skip(f"this machine cannot run {request.param}")
    with library.forced(request.param):
        yield request.param


@cache
def case_of(name: str, small: bool) -> cases.Case:
    pages = PAGES[name]
    return cases.make_case(
        pages.fmt, width=pages.width, m=pages.m, **(SMALL if small else LARGE)
    )


def attend(
    case: cases.Case, backend: str, cap: float = 0.0, scale: float = 0.2
) -> Partial:
    if backend == TRITON:
        q, view = case.on(cases.DEVICE)
        o, lse = merge(gpu.attend(q, [view], scale, None, cap))
        return o.cpu(), lse.cpu()
    if backend == library.TORCH:
        room = exact if isinstance(case.view.fmt, ExactFormat) else codes
        return room.attend(case.q, case.view, scale, cap)
    return cpu.attend(case.q, [case.view], scale, cap)


def check(case: cases.Case, backend: str, cap: float = 0.0) -> None:
    """Within what the backend states; what it leaves to the reference is skipped."""
    allowed = bounds(case, backend)
    expected = cases.exact_attention(case, 0.2, cap)

    answer = attend(case, backend, cap)

    cases.assert_alike(answer, expected, **allowed)


def bounds(case: cases.Case, backend: str) -> dict[str, float]:
    """What `assert_alike` allows a backend."""
    fmt = case.view.fmt
    raw = isinstance(fmt, ExactFormat)
    if backend == TRITON:
        if latent_of(fmt):
            pytest.skip("in test_latent.py")
        if not ops.serves_gpu(fmt):
            pytest.skip("left to the reference")
        single = raw and fmt.dtype == "float32"
        return {"tolerance": 1e-5 if single else 1e-3, "near": 2e-3, "rtol": 1e-3}
    if backend == library.TORCH:
        return {"tolerance": 1e-5}
    assert cpu.is_served(fmt, case.q)
    if raw or fmt.k.floating:
        return {"tolerance": 1e-6}
    return {"tolerance": library.CODE_ERRORS[backend], "near": 2e-3}


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_attended_as_what_they_hold(name, backend):
    check(case_of(name, backend == TRITON), backend)


@pytest.mark.parametrize(
    ("name", "cap"),
    [*product((*cases.FORMATS, *MORE), (0.7,)), *product(MORE, (0.3, 50.0))],
)
def test_scores_are_capped(name, cap, backend):
    check(case_of(name, backend == TRITON), backend, cap)


@pytest.mark.parametrize("offset", [64, 64 * 300, -64 * 300])
def test_an_order_out_of_range_is_attended_as_its_low_bits(offset, backend):
    """A peer wrote it: as an index it read other memory."""
    case = cases.make_case(cases.banded_format(3, 64), [200], heads=2, width=2)
    expected = attend(case, backend)
    view = case.view
    for page in view.segments.unique().tolist():
        start = page * 128 + cases.SEGMENT_BASE
        segment = view.arena[start : start + 2 * view.fmt.segment_bytes]
        for block in segment.view(2, -1):
            first = view.fmt.hadamard.order
            order = block[first : first + 2 * 64].view(torch.int16)
            order += offset

    answer = attend(case, backend)

    assert all(map(torch.equal, answer, expected))


@pytest.mark.parametrize("name", [*cases.FORMATS, *MORE])
def test_a_query_that_sees_nothing_gets_zero_and_minus_infinity(name, backend):
    case = case_of(name, backend == TRITON)
    hi = torch.zeros_like(case.view.hi)

    check(case.seeing(hi=hi), backend)


LO = cases.int32(
    [131, 132],
    [64, 65],
    [3, 90],
    [50, 60],
)
WINDOWED = [cases.quant_format(bits, 64, 32, 32) for bits in (2, 4)]
WINDOWED += [cases.raw_format("float16", dim) for dim in (64, 256)]


@pytest.mark.parametrize("fmt", WINDOWED, ids=["b2", "b4", "raw", "raw-D256"])
@pytest.mark.parametrize("width", [1, 3])
def test_queries_see_what_their_windows_show(fmt, width, backend):
    case = cases.make_case(
        fmt,
        lengths=[300, 170, 90, 40],
        heads=1 if backend == TRITON else 2,
        width=width,
        m=2,
    )

    check(case.seeing(lo=LO), backend)


def test_long_and_short_sequences_share_the_units_of_work(backend):
    case = cases.make_case(
        cases.quant_format(2, 64, 64, 64),
        lengths=[450, 5, 64, 130, 0],
        heads=1,
        width=4,
    )

    check(case, backend)


@pytest.mark.parametrize(
    ("lengths", "run"),
    [
        ([390, 70, 0], 3),
        ([130], 1),
    ],
)
def test_units_of_work_stay_within_segments_of_any_length(lengths, run, backend):
    case = cases.make_case(
        cases.make_format(rank=2),
        lengths,
        heads=1,
        width=4,
        run=run,
    )

    check(case, backend)
