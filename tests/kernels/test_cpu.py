"""The C library of a CPU, every path forced, against the torch reference that is its spec."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from disagg.kernels import ops
from disagg.kernels.cpu import attend, library, step
from disagg.kernels.cpu.append import append
from disagg.kernels.cpu.attend import is_served
from disagg.kernels.cpu.encode import is_encoded, seal_pages
from disagg.kernels.cpu.step import LayerCalls
from disagg.kernels.reference import codes, exact, softmax
from disagg.kernels.reference import encode as encoders
from disagg.kernels.reference.pages import DenseBlocks
from disagg.kernels.sealing import NewRows, Segmentation, in_order
from disagg.kernels.view import Softmax, View
from tests.kernels.cases import (
    BANDED,
    BASE,
    FORMATS,
    LATENTS,
    SIZES,
    assert_alike,
    banded_format,
    int32,
    latent_format,
    make_case,
    make_format,
    named_format,
    quant_format,
    random_segment,
    raw_format,
    sequence_kv,
)

KINDS = ("kivi", "pertoken", "pertoken-2bit", "kcvt", "int8", "fp8", "ott")
ENCODED = SIZES | {name: named_format(name) for name in KINDS}
ENCODED |= {f"banded-{bits}-D{dim}": banded_format(bits, dim) for bits, dim in BANDED}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCALE = 0.2


@pytest.fixture(params=library.PATHS)
def path(request):
    if request.param not in library.paths():
        pytest.skip(f"this machine cannot run {request.param}")
    with library.forced(request.param):
        yield request.param


@cache
def cached_case(name, lengths, run):
    """A case of FORMATS, which takes the reference longer to encode than the library to attend."""
    torch.manual_seed(3)
    return make_case(
        named_format(name),
        list(lengths),
        heads=2,
        width=3,
        run=run,
    )


def answer(case):
    return attend.attend(case.q, [case.view], SCALE)


@contextmanager
def threads(count):
    """Torch, and so the library, in `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_query_of(case, row, m):
    """The case with query m of one sequence alone."""
    view = case.view
    sequence = slice(row, row + 1)
    query = slice(m, m + 1)
    tables = {
        "pages": view.pages[sequence].contiguous(),
        "lo": view.lo[sequence, query].contiguous(),
        "hi": view.hi[sequence, query].contiguous(),
    }
    if view.segments is not None:
        tables["segments"] = view.segments[sequence]
        tables["owner"] = view.owner[sequence]
    alone = case.seeing(**tables)
    return replace(alone, q=case.q[sequence, query].contiguous())


def count_calls(module, monkeypatch):
    """The names of the functions of the C library that a module calls from now on."""
    calls = []
    call = module.call

    def count(name, job):
        calls.append(name)
        call(name, job)

    monkeypatch.setattr(module, "call", count)
    return calls


def test_the_library_is_built_in_ci_or_if_there_is_a_compiler():
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not (compiler or os.environ.get("CI")):
        pytest.skip("no C compiler here")

    assert library.load() is not None, "build it: python setup.py build_ext --inplace"


@pytest.fixture
def anew(monkeypatch):
    """The library as a process finds it that has not loaded it yet."""
    for name in ("load", "paths"):
        monkeypatch.setattr(library, name, getattr(library, name).__wrapped__)


def test_a_library_of_an_older_version_serves_nothing(anew, monkeypatch):
    """It would read past the ends of structs that have grown, and end the process."""
    if library.load() is None:
        pytest.skip("no library was built")
    grown = library._structure("FormatC", "more", head=library.FormatC)
    structures = [grown if x is library.FormatC else x for x in library.STRUCTURES]
    monkeypatch.setattr(library, "STRUCTURES", structures)

    assert library.load() is None
    assert library.backend() == library.TORCH
    assert "setup.py build_ext" in library.describe_backend()


def test_a_library_that_does_not_tell_its_sizes_is_of_an_older_version(
    anew, monkeypatch
):
    this_process = ctypes.CDLL(None)
    monkeypatch.setattr(library, "_built", lambda: [this_process])

    assert library.load() is None
    assert "of another version" in library.describe_backend()


def test_without_a_library_nothing_is_said_of_versions(anew, monkeypatch):
    monkeypatch.setattr(library, "_built", lambda: [])

    assert library.describe_backend() == "torch: no C library, the reference serves"


@pytest.mark.parametrize(
    ("ci", "ends"),
    [
        ("true", AssertionError),
        ("", pytest.skip.Exception),
    ],
)
def test_a_missing_compiler_fails_ci_alone(ci, ends, monkeypatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(library, "load", lambda: None)

    with pytest.raises((AssertionError, pytest.skip.Exception)) as ended:
        test_the_library_is_built_in_ci_or_if_there_is_a_compiler()

    assert ended.type is ends


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("head_dim", "latent"),
    [(256, None), (512, None), (576, 512)],
)
def test_the_largest_codes_and_queries_overflow_no_sum(bits, head_dim, latent, path):
    fmt = make_format(
        bits=bits,
        head_dim=head_dim,
        k_by="row",
        group=head_dim,
        latent=latent,
    )
    case = make_case(fmt, [256], heads=1, width=4)
    set_codes_to_the_largest(case)
    case = replace(case, q=torch.full_like(case.q, 0.01))
    expected = codes.attend(case.q.double(), case.view, SCALE)

    assert_alike(
        answer(case),
        expected,
        tolerance=library.CODE_ERRORS[path],
        near=2e-3,
    )


def set_codes_to_the_largest(case):
    """In the pages of one sequence and one head."""
    fmt = case.view.fmt
    pages = case.view.pages[0].tolist()
    assert len(pages) == 4
    for page, side in product(pages, fmt.sides):
        start = page * 128 + BASE + side.codes
        size = side.rows * side.columns * side.bits // 8
        case.view.arena[start : start + size] = 255


def test_what_no_query_sees_may_be_nan(path):
    windows = int32(
        [20, 21],
        [0, 1],
    )
    fmt = raw_format("float16", 64)
    case = make_case(
        fmt,
        lengths=[60, 40],
        heads=2,
        width=3,
        m=2,
    )
    case = case.seeing(lo=windows)
    expected, _ = answer(case)

    for row, hidden in ((0, 3), (0, 19), (1, 41)):
        raw_k(case, row, hidden)[:] = torch.nan
        raw_v(case, row, hidden)[:] = torch.inf
    o, _ = answer(case)

    assert torch.equal(o, expected)


def test_latents_that_no_query_sees_may_be_nan(path):
    fmt = raw_format("float16", 64, latent=48)
    case = make_case(fmt, lengths=[60, 40], heads=2, width=3, m=2)
    expected, _ = answer(case)

    raw_k(case, 1, token=41)[:] = torch.nan
    o, _ = answer(case)

    assert o.shape[3] == 48
    assert torch.equal(o, expected)


def raw_k(case, row, token, dtype=torch.float16):
    """K [D] of a token in raw pages, first head: a view of the arena."""
    fmt = case.view.fmt
    index, slot = divmod(token, fmt.tokens)
    page = int(case.view.pages[row, index])
    size = dtype.itemsize * fmt.head_dim
    start = page * 128 + BASE + fmt.k + slot * size
    return case.view.arena[start : start + size].view(dtype)


def raw_v(case, row, token):
    """V [D] of the same token."""
    fmt = case.view.fmt
    as_k = replace(fmt, k=fmt.v)
    return raw_k(case.seeing(fmt=as_k), row, token)


@pytest.mark.parametrize("width", [1, 3])
def test_a_query_that_sees_a_nan_key_has_no_answer(width, path):
    fmt = raw_format("float16", 64)
    case = make_case(fmt, [60, 40], heads=2, width=width)
    raw_k(case, 0, token=20)[0] = torch.nan

    for x in answer(case):
        assert x[0, 0, :width].isnan().all()
        assert x[0, 0, width:].isfinite().all()
        assert x[1].isfinite().all()


@pytest.mark.parametrize("size", [7e36, 3e38, torch.inf])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_of_any_size_is_capped(size, sign, path):
    fmt = raw_format("float32", 64)
    case = make_case(fmt, [60, 40], heads=2, width=2)
    case.q[0, 0, 0] = 0.5
    as_floats = raw_k(case, 0, token=20, dtype=torch.float32)
    as_floats[:] = 0
    as_floats[0] = sign * size

    o, lse = attend.attend(case.q, [case.view], SCALE, 30.0)

    expected_o, expected_lse = exact.attend(case.q, case.view, SCALE, 30.0)
    assert expected_o.isfinite().all()
    torch.testing.assert_close(o, expected_o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_a_nan_score_stays_one_under_a_cap(path):
    case = make_case(raw_format("float16", 64), [60, 40], heads=2, width=2)
    raw_k(case, 0, token=20)[0] = torch.nan

    o, _ = attend.attend(case.q, [case.view], SCALE, 30.0)

    assert o[0, 0, :2].isnan().all()
    assert o[1].isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        "kivi",
        "int8",
        "pertoken",
        "gear",
        "decoquant",
        "fp8",
        "latent-kivi-T128",
        "latent-pertoken-4bit",
    ],
)
@pytest.mark.parametrize("width", [1, 3])
def test_a_nan_query_has_no_answer(name, width, path):
    fmt = format_called(name)
    case = make_case(fmt, [130, 70], heads=2, width=width)
    case.q[0, 0, 0, 5] = torch.nan

    for x in answer(case):
        assert x[0, 0, 0].isnan().all()
        assert x[0, 0, 1:].isfinite().all()
        assert x[1].isfinite().all()


def format_called(name):
    """A format of FORMATS, or of LATENTS behind "latent-"."""
    latent = name.removeprefix("latent-")
    return named_format(name) if name == latent else latent_format(latent)


LENGTHS = (700, 90, 333)


def case_of_windows(name, width):
    """Five queries a sequence that see less than the last one, some of them a window."""
    if name in FORMATS:
        case = cached_case(name, LENGTHS, 3)
    else:
        fmts = {"banded": banded_format(2, 128), "raw": raw_format("bfloat16", 64)}
        fmt = fmts[name] if name in fmts else format_called(name)
        case = make_case(fmt, list(LENGTHS), heads=2, width=3)
    heads = 2 * width
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(3, 5, heads, case.q.shape[3], generator=generator)
    hidden = int32([8, 300, 0, 5, 80])
    hi = (case.view.hi - hidden).clamp_min(0)
    lo = int32([0, 0, 10, 65, 1]).expand(3, 5)
    case = case.seeing(
        lo=lo.contiguous(),
        hi=hi.contiguous(),
    )
    return replace(case, q=q)


@pytest.mark.parametrize(
    "name",
    [
        "kivi",
        "int8",
        "gear",
        "gear-l-shared",
        "decoquant",
        "fp8",
        "banded",
        "raw",
        "latent-kivi-4bit",
        "latent-kcvt-8bit",
        "latent-pertoken-8bit",
    ],
)
@pytest.mark.parametrize("width", [1, 3])
def test_an_answer_depends_to_the_bit_on_nothing_but_its_query(name, width, path):
    """Not on the batch, the threads, or the queries that come together."""
    case = case_of_windows(name, width)
    together_o, together_lse = answer(case)

    for count in (1, 3):
        with threads(count):
            o, lse = answer(case)
        assert torch.equal(o, together_o)
        assert torch.equal(lse, together_lse)

    for row, m in product(range(3), range(5)):
        o, lse = answer(one_query_of(case, row, m))
        assert torch.equal(o[0, 0], together_o[row, m])
        assert torch.equal(lse[0, 0], together_lse[row, m])


def test_views_are_attended_in_one_call_as_if_merged(path, monkeypatch):
    pages = make_case(quant_format(4, 64, 32, 32), [130, 64], heads=2, width=3)
    tail = make_case(raw_format("float16", 64), [40, 7], heads=2, width=3)
    views = [pages.view, tail.view]
    partials = [attend.attend(pages.q, [view], SCALE) for view in views]
    calls = count_calls(attend, monkeypatch)

    o = ops.attend(pages.q, views, Softmax(SCALE))

    assert calls == ["disagg_attend"]
    assert torch.allclose(o, softmax.merge(partials), atol=1e-6)

    unsupported = make_case(make_format(v_by="row"), [70, 9], heads=2, width=3)
    partials.append(codes.attend(pages.q, unsupported.view, SCALE))
    views.append(unsupported.view)

    o = ops.attend(pages.q, views, Softmax(SCALE))

    assert torch.allclose(o, softmax.merge(partials), atol=1e-6)


def test_the_reference_serves_what_the_library_does_not_support():
    fmt = quant_format(4, 64, 32, 32)
    case = make_case(fmt, [100], heads=2, width=3)
    expected, _ = codes.attend(case.q, case.view, SCALE)

    with library.forced(library.TORCH):
        assert not is_served(fmt, case.q)
        o = ops.attend(case.q, [case.view], Softmax(SCALE))

    assert torch.equal(o, expected)
    assert not is_served(make_format(v_by="row"), case.q)
    assert not is_served(fmt, case.q.double())
    assert not is_served(raw_format("float16", 1024), case.q)
    assert not is_served(make_format(head_dim=48, latent=32), case.q)
    with pytest.raises(ValueError, match="cpu-neon"), library.forced("cpu-neon"):
        pass


def bytes_of(k, v, fmt, tokens=2048, frozen=None):
    """Blocks and segments by the reference."""
    cut = Segmentation(tokens, 0, frozen)
    return encoders.encode(k, v, fmt, cut)


def encoded(k, v, fmt, tokens, frozen=None):
    """Blocks and segments by the library, where there was something else before."""
    assert is_encoded(fmt, k)
    heads, n, _ = k.shape
    shape = (n // fmt.tokens, heads, fmt.block_bytes)
    blocks = torch.full(shape, 7, dtype=torch.uint8)
    segments = seal_pages(
        k,
        v,
        in_order(blocks),
        fmt,
        Segmentation(tokens, 0, frozen),
    )
    return blocks, segments


def tokens_first(x):
    """The same numbers, a view of tokens first in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def hostile(head_dim, n):
    """K and V [3, n, D] as models have them, and as they hurt."""
    k, v = sequence_kv(n, heads=3, head_dim=head_dim)
    yield k, v
    yield k.half(), v.half()
    yield k.bfloat16(), v.bfloat16()
    yield k.double(), v.half()

    k_by_token = tokens_first(k)[:, 64:]
    v_by_token = tokens_first(v)[:, 64:]
    yield k_by_token, v_by_token
    yield k_by_token * 0, v_by_token * 0  # of both signs

    k = k.clone()
    v = v.clone()
    hurtful = (torch.inf, -torch.inf, 1e30, -7e4, torch.nan, 1e-9, 6e-8, -0.0)
    for i, x in enumerate(hurtful):
        k[0, i + 3, i] = x
        v[1, i + 9, i] = x
    k[1, :, 7] = 3.25
    v[0, 20] = 0.0
    v[1, 64:128] *= 1e4
    k[1, :, 9] += 1000
    k[2] *= 1e-6
    v[2] *= 1e-7
    yield k, v


def test_ties_between_codes_are_rounded_as_in_the_reference(path):
    # in about one of a million numbers the rounding of the product matters
    fmt = quant_format(4, 128, 64, 64)
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(2, 16, 2048, 128, generator=generator)
    k, v = numbers.half()
    expected, _ = bytes_of(k, v, fmt)

    blocks, _ = encoded(k, v, fmt, 64)

    assert torch.equal(blocks, expected)


def test_an_order_out_of_range_encodes_as_its_low_bits(path):
    fmt = banded_format(3, 64)
    k, v = sequence_kv(128, heads=2, head_dim=64)
    frozen = random_segment(fmt, heads=2, seed=1)
    order = DenseBlocks(frozen).plane(torch.int16, fmt.hadamard.order, (1, 64))
    expected = encoded(k, v, fmt, 2048, frozen)[0]
    order += 64 * 300

    blocks, _ = encoded(k, v, fmt, 2048, frozen)

    assert torch.equal(blocks, expected)
    assert torch.equal(blocks, bytes_of(k, v, fmt, frozen=frozen)[0])


@pytest.mark.parametrize("name", ENCODED)
def test_bytes_of_every_kind_are_those_of_the_reference(name, path):
    fmt = ENCODED[name]
    frozen = random_segment(fmt, 3, 0) if fmt.hadamard else None

    for all_k, all_v in hostile(fmt.head_dim, 256):
        whole_pages = all_k.shape[1] // fmt.tokens * fmt.tokens
        k = all_k[:, :whole_pages]
        v = all_v[:, :whole_pages]
        expected, expected_segments = bytes_of(k, v, fmt, 128, frozen)

        blocks, segments = encoded(k, v, fmt, 128, frozen)

        assert torch.equal(blocks, expected)
        if expected_segments is None:
            assert segments is None
        else:
            assert torch.equal(segments, expected_segments)


@pytest.mark.parametrize("name", LATENTS)
def test_bytes_of_latents_are_those_of_the_reference(name, path):
    fmt = latent_format(name)

    for k in (sequence_kv(256, 2, fmt.head_dim)[0], hurtful_keys(fmt.head_dim)):
        expected, expected_segments = bytes_of(k, None, fmt, 128)

        blocks, segments = encoded(k, None, fmt, 128)

        assert torch.equal(blocks, expected)
        if expected_segments is not None:
            assert torch.equal(segments, expected_segments)


def hurtful_keys(head_dim):
    *_, (k, _) = hostile(head_dim, 256)
    return k


def test_every_number_of_fp8_is_rounded_and_read_as_torch_does(path):
    fmt = named_format("fp8")
    bits = torch.arange(-32768, 32768).to(torch.int16)
    numbers = bits.view(torch.float16)
    finite = numbers[numbers.isfinite()]
    x = finite[: 15 * 64 * 64].view(1, -1, 64)
    expected, _ = bytes_of(x, x, fmt)

    blocks, _ = encoded(x, x, fmt, 64)

    assert torch.equal(blocks, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "of_tokens",
    [False, True],
    ids=["heads-first", "tokens-first"],
)
def test_sums_of_squares_are_those_of_the_reference(of_tokens, dtype, path):
    torch.manual_seed(7)
    for count, begun, dim in (
        (100, 0, 64),
        (7, 5, 48),
        (32, 15, 80),
        (1, 15, 16),
        (0, 0, 16),
    ):
        exponents = torch.rand(6, count, 1) * 30 - 20  # sums below 2**33 are exact
        numbers = torch.randn(6, count, dim) * 2**exponents
        q = numbers.to(dtype)
        q[0, 3:4, 5] = torch.nan
        q[5, 4:5, 2] = -torch.inf
        if of_tokens:
            q = tokens_first(q)
        expected = encoders.sum_squares(q, 2, begun)
        units = -(-(begun + count) // 16)

        sums = ops.sum_squares(q, 2, begun)

        assert sums.shape == (units, 2, dim)
        assert torch.equal(sums.nan_to_num(-1), expected.nan_to_num(-1))


def two_long_sequences():
    return make_case(
        quant_format(4, 64, 32, 32),
        lengths=[900, 400],
        heads=4,
        width=2,
    )


def test_threads_and_children_of_a_process_attend_alike():
    case = two_long_sequences()
    if not is_served(case.view.fmt, case.q):
        pytest.skip("no library was built")
    expected, _ = answer(case)
    equal = []

    def is_equal():
        o, _ = answer(case)
        return torch.equal(o, expected)

    def work():
        equal.extend(is_equal() for _ in range(20))

    with threads(3):
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert equal == [True] * 80

        child = os.fork()
        if child == 0:
            os._exit(0 if is_equal() else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0


def fork_while_others_attend():
    """Fork 30 children beside a thread that attends; each must attend in its one thread."""
    case = two_long_sequences()
    torch.set_num_threads(3)
    forking = threading.Event()

    def work():
        while not forking.is_set():
            answer(case)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(30):
            child = os.fork()
            if child == 0:
                answer(case)
                thread_count = len(os.listdir("/proc/self/task"))
                os._exit(thread_count)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 1
    finally:
        forking.set()
        worker.join()


def test_a_child_forked_while_others_attend_attends_alone(pytestconfig):
    if not library.paths():
        pytest.skip("no library was built")
    # A process of its own: what other tests import, gRPC above all, has threads in children too.
    code = "from tests.kernels import test_cpu; test_cpu.fork_while_others_attend()"

    subprocess.run(
        [sys.executable, "-c", code],
        cwd=pytestconfig.rootpath,
        check=True,
        timeout=60,
    )


@dataclass(frozen=True)
class Step:
    """A step of two sequences over sealed pages and tails, in the layer page of a rank.

    ready:   its calls, prepared for the first layer page
    q:       [Hq, N, D]; k, v: [H, N, D]
    queries: q as `attend` takes it
    """

    arena: Tensor
    rows: NewRows
    views: list[View]
    ready: LayerCalls
    rank: int
    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensor

    def run(self, softmax, written=False):
        return self.ready.run(
            self.rank,
            self.q,
            self.k,
            self.v,
            written,
            softmax,
        )


def make_step(kind, dtype):
    """Inputs of a kind, raw pages of a dtype; two numbers of V are infinite."""
    heads = 2
    rank = 1
    raw = raw_format(dtype, 64)
    sealed_case = make_case(quant_format(4, 64, 32, 32), [130, 64], heads, width=3)
    tail_case = make_case(raw, [40, 7], heads, width=3)
    arena, sealed, tail = in_one_arena(sealed_case.view, tail_case.view)
    tail = replace(tail, hi=tail.hi + 1)
    rows = NewRows(
        pages=torch.stack([tail.pages[0, 2], tail.pages[1, 0]]),
        slots=int32(8, 7),
        fmt=raw,
        base=BASE,
    )
    q = torch.randn(6, 2, 64).to(kind)
    k = torch.randn(heads, 2, 64).to(kind)
    v = torch.randn(heads, 2, 64).to(kind)
    v[0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    queries = q.transpose(0, 1).float().unsqueeze(1)
    first_sealed, first_tail, first_rows = (
        replace(x, base=BASE - rank * heads * x.fmt.block_bytes)
        for x in (sealed, tail, rows)
    )
    return Step(
        arena,
        rows,
        views=[sealed, tail],
        ready=ops.prepare(
            arena,
            first_rows,
            [first_sealed, first_tail],
            queries,
        ),
        rank=rank,
        q=q,
        k=k,
        v=v,
        queries=queries,
    )


def in_one_arena(first, second):
    """An arena that holds the pages of two views, and the views of it."""
    arena = torch.cat([first.arena, second.arena])
    shift = first.arena.numel() // 128
    pages = second.pages + shift
    return (
        arena,
        replace(first, arena=arena),
        replace(second, arena=arena, pages=pages),
    )


def of_all_dtypes(test):
    """A test for each dtype of the inputs (`kind`) and of raw pages."""
    dtypes = ["float32", "bfloat16", "float16"]
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    test = pytest.mark.parametrize("dtype", dtypes)(test)
    return pytest.mark.parametrize("kind", kinds)(test)


def saturated(x, dtype):
    """[H, N, D] as rows [N, H, D] of a dtype, without infinities."""
    largest = torch.finfo(dtype).max
    return x.to(dtype).clamp(-largest, largest).transpose(0, 1)


@of_all_dtypes
def test_a_layer_of_a_step_is_appended_as_by_an_append(kind, dtype, path, monkeypatch):
    """In any layer page; what the raw dtype cannot hold saturates."""
    step_case = make_step(kind, dtype)
    stored = getattr(torch, dtype)
    expected = step_case.arena.clone()
    append(
        expected,
        saturated(step_case.k, stored),
        saturated(step_case.v, stored),
        step_case.rows,
    )
    calls = count_calls(step, monkeypatch)

    step_case.run(Softmax(SCALE))

    assert calls == ["disagg_step"]
    assert torch.equal(step_case.arena, expected)


@of_all_dtypes
def test_a_layer_of_a_step_is_attended_as_by_an_attention(kind, dtype, path):
    step_case = make_step(kind, dtype)

    o = step_case.run(Softmax(SCALE))

    expected, _ = attend.attend(step_case.queries, step_case.views, SCALE)
    assert o.dtype is kind
    assert torch.equal(o, expected[:, 0].to(kind))


@of_all_dtypes
def test_a_step_that_is_written_already_writes_nothing(kind, dtype, path):
    step_case = make_step(kind, dtype)
    expected = step_case.run(Softmax(SCALE))
    written = step_case.arena.clone()
    step_case.k.zero_()
    step_case.v.zero_()

    o = step_case.run(Softmax(SCALE), written=True)

    assert torch.equal(o, expected)
    assert torch.equal(step_case.arena, written)


@of_all_dtypes
def test_a_step_with_sinks_is_attended_as_by_an_attention(kind, dtype, path):
    step_case = make_step(kind, dtype)
    step_case.run(Softmax(SCALE))
    written = step_case.arena.clone()
    with_sinks = Softmax(SCALE, 5.0, torch.linspace(-1, 3, 6))

    o = step_case.run(with_sinks, written=True)

    expected = ops.attend(step_case.queries, step_case.views, with_sinks)
    assert torch.equal(o, expected[:, 0].to(kind))
    assert torch.equal(step_case.arena, written)


def test_a_layer_of_latents_is_appended_and_attended(path):
    raw = raw_format("bfloat16", 96, latent=80)
    sealed_fmt = latent_format("pertoken-4bit")
    sealed_case = make_case(sealed_fmt, [130, 64], heads=1, width=16)
    tail_case = make_case(raw, [40, 7], heads=1, width=16)
    arena, sealed, tail = in_one_arena(sealed_case.view, tail_case.view)
    tail = replace(tail, hi=tail.hi + 1)
    pages = torch.stack([tail.pages[0, 2], tail.pages[1, 0]])
    rows = NewRows(pages, slots=int32(8, 7), fmt=raw, base=BASE)
    k = torch.randn(1, 2, 96)
    queries = torch.randn(2, 1, 16, 96)
    ready = ops.prepare(arena, rows, [sealed, tail], queries)

    q = queries[:, 0].transpose(0, 1)
    o = ready.run(0, q, k, k[..., :80], False, Softmax(SCALE))

    expected_arena = arena.clone()
    append(expected_arena, k.transpose(0, 1), None, rows)
    expected, _ = attend.attend(queries, [sealed, tail], SCALE)
    assert torch.equal(arena, expected_arena)
    assert torch.equal(o, expected[:, 0])


def test_what_points_to_a_format_keeps_it():
    view = cached_case("kivi", (390, 70), 3).view
    rows = first_slots(view, raw_format("float16", 64))
    q = torch.zeros(2, 1, 6, 64)
    view_format = library.format_of(view.fmt)
    row_format = library.format_of(rows.fmt)

    ready = ops.prepare(view.arena, rows, [view], q)
    library.format_of.cache_clear()

    owners_of_views, _, _, row_owner = ready._owners
    assert any(owner is view_format for owner in owners_of_views[0])
    assert row_owner is row_format


def first_slots(view, raw):
    """New rows in the first page of each of two sequences."""
    return NewRows(
        pages=view.pages[:, 0].clone(),
        slots=int32(0, 0),
        fmt=raw,
        base=BASE,
    )


def test_a_step_that_other_code_has_to_serve_is_not_prepared():
    fmt = make_format(v_by="row")
    view = make_case(fmt, [70, 9], heads=2, width=3).view
    rows = first_slots(view, raw_format("float32", 64))
    q = torch.zeros(2, 1, 6, 64)

    ready = ops.prepare(view.arena, rows, [view], q)

    assert ready is None
