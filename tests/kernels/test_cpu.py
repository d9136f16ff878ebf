"""The C library of a CPU, every path forced, against the torch reference that is its spec."""

import os
import shutil
import subprocess
import sys
import threading
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
from disagg.kernels.reference import codes, softmax
from disagg.kernels.reference import encode as encoders
from disagg.kernels.sealing import NewRows, Segmentation, in_order
from disagg.kernels.view import Softmax, View
from tests.kernels.cases import (
    BANDED,
    BASE,
    FORMATS,
    SIZES,
    assert_alike,
    banded_format,
    make_case,
    make_format,
    quant_format,
    random_kv,
    random_segment,
    raw_format,
)

KINDS = ("kivi", "pertoken", "pertoken-2bit", "kcvt", "int8", "fp8", "ott")
ENCODED = SIZES | {name: make_format(**FORMATS[name]) for name in KINDS}
ENCODED |= {f"banded-{bits}-D{dim}": banded_format(bits, dim) for bits, dim in BANDED}


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
    return make_case(make_format(**FORMATS[name]), list(lengths), 2, 3, run=run)


def answer(case):
    return attend.attend(case.q, [case.view], 0.2)


def one_query_of(case, row, m):
    """The case with query m of one sequence alone."""
    view = case.view
    sequence = slice(row, row + 1)
    query = slice(m, m + 1)
    alone = case.seeing(
        pages=view.pages[sequence].contiguous(),
        lo=view.lo[sequence, query].contiguous(),
        hi=view.hi[sequence, query].contiguous(),
        segments=None if view.segments is None else view.segments[sequence],
        owner=None if view.owner is None else view.owner[sequence],
    )
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


def test_the_library_is_built_in_ci_and_wherever_there_is_a_compiler():
    if not (shutil.which("cc") or shutil.which("gcc") or os.environ.get("CI")):
        pytest.skip("no C compiler here")
    assert library.load() is not None, "build it: python setup.py build_ext --inplace"


@pytest.mark.parametrize(
    ("ci", "ends"), [("true", AssertionError), ("", pytest.skip.Exception)]
)
def test_a_missing_compiler_fails_ci_alone(ci, ends, monkeypatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(library, "load", lambda: None)

    with pytest.raises((AssertionError, pytest.skip.Exception)) as ended:
        test_the_library_is_built_in_ci_and_wherever_there_is_a_compiler()
    assert ended.type is ends


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_the_largest_codes_and_queries_overflow_no_sum(bits, head_dim, path):
    fmt = make_format(bits=bits, head_dim=head_dim, k_by="row", group=head_dim)
    case = make_case(fmt, [256], 1, 4)

    assert case.view.pages.numel() == 4

    for page in case.view.pages[0].tolist():  # every code is the largest there is
        for side in (fmt.k, fmt.v):
            at = page * 128 + BASE + side.codes
            case.view.arena[at : at + side.rows * side.columns * bits // 8] = 255
    case = replace(case, q=torch.full_like(case.q, 0.01))
    expected = codes.attend(case.q.double(), case.view, 0.2)

    assert_alike(answer(case), expected, library.CODE_ERRORS[path], 2e-3)


def test_what_no_query_sees_may_be_nan(path):
    lo = torch.tensor([[20, 21], [0, 1]], dtype=torch.int32)
    case = make_case(raw_format("float16", 64), [60, 40], 2, 3, m=2).seeing(lo=lo)
    expected, _ = answer(case)
    numbers = case.view.arena.view(torch.float16)
    for row, hidden in ((0, 3), (0, 19), (1, 41)):
        page, slot = divmod(hidden, 16)
        at = (int(case.view.pages[row, page]) * 128 + BASE) // 2 + slot * 64
        numbers[at : at + 64] = torch.nan
        numbers[at + 16 * 64 : at + 17 * 64] = torch.inf

    assert torch.equal(answer(case)[0], expected)


@pytest.mark.parametrize("width", [1, 3])
def test_a_query_that_sees_a_nan_key_has_no_answer(width, path):
    case = make_case(raw_format("float16", 64), [60, 40], 2, width)
    page = int(case.view.pages[0, 1])
    at = (page * 128 + BASE) // 2 + 4 * 64  # of token 20 and head 0
    case.view.arena.view(torch.float16)[at] = torch.nan

    for x in answer(case):
        assert x[0, 0, :width].isnan().all()
        assert x[0, 0, width:].isfinite().all()
        assert x[1].isfinite().all()


@pytest.mark.parametrize(
    "name", ["kivi", "int8", "pertoken", "gear", "decoquant", "fp8"]
)
@pytest.mark.parametrize("width", [1, 3])
def test_a_nan_query_has_no_answer(name, width, path):
    case = make_case(make_format(**FORMATS[name]), [130, 70], 2, width)
    case.q[0, 0, 0, 5] = torch.nan
    for x in answer(case):
        assert x[0, 0, 0].isnan().all()
        assert x[0, 0, 1:].isfinite().all()
        assert x[1].isfinite().all()


@pytest.mark.parametrize(
    "name",
    ["kivi", "int8", "gear", "gear-l-shared", "decoquant", "fp8", "banded", "raw"],
)
@pytest.mark.parametrize("width", [1, 3])
def test_an_answer_depends_to_the_bit_on_nothing_but_its_query(name, width, path):
    """Not on the batch, the threads, or the queries that come together."""
    case = cached_case(name, (700, 90, 333), 3) if name in FORMATS else None
    fmt = banded_format(2, 128) if name == "banded" else raw_format("bfloat16", 64)
    case = case or make_case(fmt, [700, 90, 333], 2, 3)
    case = replace(case, q=case.q[:, :, : 2 * width])
    # queries that see less, and windows
    hi = case.view.hi - torch.tensor([[8, 300, 0, 5, 80]])
    lo = torch.tensor([[0, 0, 10, 65, 1]]).expand(3, 5).int().contiguous()
    q = torch.randn(3, 5, *case.q.shape[2:], generator=torch.Generator().manual_seed(5))
    case = replace(case.seeing(lo=lo, hi=hi.clamp_min(0).int().contiguous()), q=q)
    together = answer(case)
    threads = torch.get_num_threads()

    for count in (1, 3):
        torch.set_num_threads(count)
        again = answer(case)
        assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))

    torch.set_num_threads(threads)

    for row, m in product(range(3), range(5)):
        o, lse = answer(one_query_of(case, row, m))
        assert torch.equal(o[0, 0], together[0][row, m])
        assert torch.equal(lse[0, 0], together[1][row, m])


def test_views_are_attended_in_one_call_as_if_merged(path, monkeypatch):
    pages = make_case(quant_format(4, 64, 32, 32), [130, 64], 2, 3)
    tail = make_case(raw_format("float16", 64), [40, 7], 2, 3)
    # the library does not support this one
    other = make_case(make_format(v_by="row"), [70, 9], 2, 3)
    calls = count_calls(attend, monkeypatch)
    views = [pages.view, tail.view]

    o = ops.attend(pages.q, views, Softmax(0.2))

    assert calls == ["disagg_attend"]

    partials = [attend.attend(pages.q, [view], 0.2) for view in views]

    assert torch.allclose(o, softmax.merge(partials), atol=1e-6)

    o = ops.attend(pages.q, [*views, other.view], Softmax(0.2))

    partials.append(codes.attend(pages.q, other.view, 0.2))

    assert torch.allclose(o, softmax.merge(partials), atol=1e-6)


def test_the_reference_serves_what_the_library_does_not_support():
    case = make_case(quant_format(4, 64, 32, 32), [100], 2, 3)
    with library.forced(library.TORCH):
        assert not is_served(case.view.fmt, case.q)
        o = ops.attend(case.q, [case.view], Softmax(0.2))
        assert torch.equal(o, codes.attend(case.q, case.view, 0.2)[0])

    assert not is_served(make_format(v_by="row"), case.q)
    assert not is_served(case.view.fmt, case.q.double())
    assert not is_served(raw_format("float16", 1024), case.q)
    with pytest.raises(ValueError, match="cpu-neon"), library.forced("cpu-neon"):
        pass


def bytes_of(k, v, fmt, tokens=2048, frozen=None):
    return encoders.encode(k, v, fmt, Segmentation(tokens, 0, frozen))


def hostile(head_dim, n):
    """K and V [3, n, D] as models have them, and as they hurt."""
    k, v = (x[0] for x in random_kv([n], 3, head_dim, 64))
    yield k, v
    yield k.half(), v.half()
    yield k.bfloat16(), v.bfloat16()
    yield k.double(), v.half()
    k_by_token = k.transpose(0, 1).contiguous().transpose(0, 1)[:, 64:]
    v_by_token = v.transpose(0, 1).contiguous().transpose(0, 1)[:, 64:]
    yield k_by_token, v_by_token
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
    yield k_by_token * 0, v_by_token * 0  # of both signs


def test_codes_between_two_are_rounded_as_the_reference_rounds_them(path):
    # in about one of a million numbers the rounding of the product matters
    fmt = quant_format(4, 128, 64, 64)
    generator = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 16, 2048, 128, generator=generator).half()
    blocks, _ = encoded(k, v, fmt, 64)

    assert torch.equal(blocks, bytes_of(k, v, fmt)[0])


def encoded(k, v, fmt, tokens, frozen=None):
    """Blocks and segments by the library, where there was something else before."""
    cut = Segmentation(tokens, 0, frozen)
    assert is_encoded(fmt, k)
    count = k.shape[1] // fmt.tokens
    blocks = torch.full((count, k.shape[0], fmt.block_bytes), 7, dtype=torch.uint8)
    return blocks, seal_pages(k, v, in_order(blocks), fmt, cut)


@pytest.mark.parametrize("name", ENCODED)
def test_bytes_of_every_kind_are_those_of_the_reference(name, path):
    fmt = ENCODED[name]
    frozen = random_segment(fmt, 3, 0) if fmt.hadamard else None
    for x in hostile(fmt.head_dim, 256):
        k, v = (y[:, : y.shape[1] // fmt.tokens * fmt.tokens] for y in x)
        blocks, segments = encoded(k, v, fmt, 128, frozen)
        expected, expected_segments = bytes_of(k, v, fmt, 128, frozen)
        assert torch.equal(blocks, expected)
        if expected_segments is None:
            assert segments is None
        else:
            assert torch.equal(segments, expected_segments)


def test_every_number_of_fp8_is_rounded_and_read_as_torch_does(path):
    fmt = make_format(**FORMATS["fp8"])
    every = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()][: 15 * 64 * 64].view(1, -1, 64)
    blocks, _ = encoded(every, every, fmt, 64)

    assert torch.equal(blocks, bytes_of(every, every, fmt)[0])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize(
    "of_tokens", [False, True], ids=["heads-first", "tokens-first"]
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
        sizes = torch.rand(6, count, 1) * 30 - 20  # sums below 2**33, which are exact
        q = (torch.randn(6, count, dim) * 2**sizes).to(dtype)
        q[0, 3:4, 5] = torch.nan
        q[5, 4:5, 2] = -torch.inf
        if of_tokens:
            q = q.transpose(0, 1).contiguous().transpose(0, 1)
        sums = ops.sum_squares(q, 2, begun)
        expected = encoders.sum_squares(q, 2, begun)
        assert sums.shape == (-(-(begun + count) // 16), 2, dim)
        assert torch.equal(sums.nan_to_num(-1), expected.nan_to_num(-1))


def test_threads_and_children_of_a_process_attend_alike():
    fmt = quant_format(4, 64, 32, 32)
    case = make_case(fmt, [900, 400], 4, 2)
    if not is_served(fmt, case.q):
        pytest.skip("no library was built")
    expected, _ = answer(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    equal = []

    def work():
        equal.extend(torch.equal(answer(case)[0], expected) for _ in range(20))

    try:
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert equal == [True] * 80
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(answer(case)[0], expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)


def fork_while_others_attend():
    """Fork 30 children beside a thread that attends; each must attend in its one thread."""
    case = make_case(quant_format(4, 64, 32, 32), [900, 400], 4, 2)
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
                os._exit(len(os.listdir("/proc/self/task")))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    finally:
        forking.set()
        worker.join()


def test_a_child_forked_while_others_attend_attends_alone(pytestconfig):
    if not library.paths():
        pytest.skip("no library was built")
    # A process of its own: what other tests import, gRPC above all, has threads in children too.
    code = "from tests.kernels import test_cpu; test_cpu.fork_while_others_attend()"
    subprocess.run(
        [sys.executable, "-c", code], cwd=pytestconfig.rootpath, check=True, timeout=60
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
        return self.ready.run(self.rank, self.q, self.k, self.v, written, softmax)


def make_step(kind, dtype):
    """Inputs of a kind, raw pages of a dtype; two numbers of V are infinite."""
    heads = 2
    rank = 1
    raw = raw_format(dtype, 64)
    sealed = make_case(quant_format(4, 64, 32, 32), [130, 64], heads, 3).view
    tail = make_case(raw, [40, 7], heads, 3).view
    arena = torch.cat([sealed.arena, tail.arena])
    shift = sealed.arena.numel() // 128
    pages = torch.stack([tail.pages[0, 2], tail.pages[1, 0]]) + shift
    slots = torch.tensor([8, 7]).int()
    rows = NewRows(pages, slots, raw, BASE)
    tail = replace(tail, arena=arena, pages=tail.pages + shift, hi=tail.hi + 1)
    sealed = replace(sealed, arena=arena)
    q = torch.randn(6, 2, 64).to(kind)
    k, v = (torch.randn(heads, 2, 64).to(kind) for _ in "kv")
    v[0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    queries = q.transpose(0, 1).float().unsqueeze(1)
    first_sealed, first_tail, first_rows = (
        replace(x, base=BASE - rank * heads * x.fmt.block_bytes)
        for x in (sealed, tail, rows)
    )
    ready = ops.prepare(arena, first_rows, [first_sealed, first_tail], queries)
    return Step(arena, rows, [sealed, tail], ready, rank, q, k, v, queries)


def of_all_dtypes(test):
    """A test for each dtype of the inputs (`kind`) and of raw pages."""
    dtypes = ["float32", "bfloat16", "float16"]
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    test = pytest.mark.parametrize("dtype", dtypes)(test)
    return pytest.mark.parametrize("kind", kinds)(test)


@of_all_dtypes
def test_a_layer_of_a_step_is_appended_as_by_an_append(kind, dtype, path, monkeypatch):
    """In any layer page; what the raw dtype cannot hold saturates."""
    step_case = make_step(kind, dtype)
    before = step_case.arena.clone()
    calls = count_calls(step, monkeypatch)

    step_case.run(Softmax(0.2))

    assert calls == ["disagg_step"]

    written = step_case.arena.clone()
    stored = getattr(torch, dtype)
    largest = torch.finfo(stored).max
    step_case.arena.copy_(before)
    k, v = (
        x.to(stored).clamp(-largest, largest).transpose(0, 1)
        for x in (step_case.k, step_case.v)
    )
    append(step_case.arena, k, v, step_case.rows)

    assert torch.equal(step_case.arena, written)


@of_all_dtypes
def test_a_layer_of_a_step_is_attended_as_by_an_attention(kind, dtype, path):
    step_case = make_step(kind, dtype)

    o = step_case.run(Softmax(0.2))

    assert o.dtype is kind

    expected, _ = attend.attend(step_case.queries, step_case.views, 0.2)

    assert torch.equal(o, expected[:, 0].to(kind))


@of_all_dtypes
def test_a_step_that_is_written_already_writes_nothing(kind, dtype, path):
    step_case = make_step(kind, dtype)
    o = step_case.run(Softmax(0.2))
    written = step_case.arena.clone()
    step_case.k.zero_()
    step_case.v.zero_()

    assert torch.equal(step_case.run(Softmax(0.2), written=True), o)
    assert torch.equal(step_case.arena, written)


@of_all_dtypes
def test_a_step_with_sinks_is_attended_as_by_an_attention(kind, dtype, path):
    step_case = make_step(kind, dtype)
    step_case.run(Softmax(0.2))
    written = step_case.arena.clone()
    with_sinks = Softmax(0.2, 5.0, torch.linspace(-1, 3, 6))

    o = step_case.run(with_sinks, written=True)

    expected = ops.attend(step_case.queries, step_case.views, with_sinks)

    assert torch.equal(o, expected[:, 0].to(kind))
    assert torch.equal(step_case.arena, written)


def test_what_points_to_a_format_keeps_it():
    view = cached_case("kivi", (390, 70), 3).view
    rows = NewRows(
        view.pages[:, 0].clone(), torch.zeros(2).int(), raw_format("float16", 64), BASE
    )
    formats = [library.format_of(x) for x in (view.fmt, rows.fmt)]
    ready = ops.prepare(view.arena, rows, [view], torch.zeros(2, 1, 6, 64))
    library.format_of.cache_clear()
    owners_of_views, _, _, row_format = ready._owners

    assert any(owner is formats[0] for owner in owners_of_views[0])
    assert row_format is formats[1]


def test_a_step_that_other_code_has_to_serve_is_not_prepared():
    raw = raw_format("float32", 64)
    view = make_case(make_format(v_by="row"), [70, 9], 2, 3).view
    rows = NewRows(view.pages[:, 0].clone(), torch.zeros(2).int(), raw, BASE)

    assert ops.prepare(view.arena, rows, [view], torch.zeros(2, 1, 6, 64)) is None
