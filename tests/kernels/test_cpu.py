"""The C library of a CPU, every path forced, against the torch reference that is its spec."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache

import pytest
import torch

from disagg.kernels import ops
from disagg.kernels.cpu import attend, library, step
from disagg.kernels.cpu.append import append
from disagg.kernels.cpu.attend import is_served
from disagg.kernels.cpu.encode import is_encoded, seal_pages
from disagg.kernels.reference import codes, softmax
from disagg.kernels.reference import encode as encoders
from disagg.kernels.sealing import NewRows, Segmentation, in_order
from disagg.kernels.view import Softmax
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
def known(name, lengths, run):
    """A case of FORMATS, which takes the reference longer to encode than the library to attend."""
    torch.manual_seed(3)
    return make_case(make_format(**FORMATS[name]), list(lengths), 2, 3, run=run)


def answer(case):
    return attend.attend(case.q, [case.view], 0.2)


def test_the_library_is_built_in_ci_and_wherever_there_is_a_compiler():
    if not (shutil.which("cc") or shutil.which("gcc") or os.environ.get("CI")):
        pytest.skip("no C compiler here")
    assert library.load() is not None, "build it: python setup.py build_ext --inplace"


@pytest.mark.parametrize(
    ("ci", "ends"), [("true", AssertionError), ("", pytest.skip.Exception)]
)
def test_a_missing_compiler_fails_ci_and_nobody_else(ci, ends, monkeypatch):
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
    wanted = codes.attend(case.q.double(), case.view, 0.2)
    assert_alike(answer(case), wanted, library.CODE_ERRORS[path], 2e-3)


def test_what_no_query_sees_may_be_no_number(path):
    lo = torch.tensor([[20, 21], [0, 1]], dtype=torch.int32)
    case = make_case(raw_format("float16", 64), [60, 40], 2, 3, m=2).seeing(lo=lo)
    wanted, _ = answer(case)
    numbers = case.view.arena.view(torch.float16)
    for row, hidden in ((0, 3), (0, 19), (1, 41)):
        page, slot = divmod(hidden, 16)
        at = (int(case.view.pages[row, page]) * 128 + BASE) // 2 + slot * 64
        numbers[at : at + 64] = torch.nan
        numbers[at + 16 * 64 : at + 17 * 64] = torch.inf
    assert torch.equal(answer(case)[0], wanted)


@pytest.mark.parametrize("width", [1, 3])
def test_who_sees_a_key_that_is_no_number_has_no_answer(width, path):
    case = make_case(raw_format("float16", 64), [60, 40], 2, width)
    at = (
        int(case.view.pages[0, 1]) * 128 + BASE
    ) // 2 + 4 * 64  # of token 20 and head 0
    case.view.arena.view(torch.float16)[at] = torch.nan
    for x in answer(case):
        assert x[0, 0, :width].isnan().all()
        assert x[0, 0, width:].isfinite().all()
        assert x[1].isfinite().all()


@pytest.mark.parametrize(
    "name", ["kivi", "int8", "pertoken", "gear", "decoquant", "fp8"]
)
@pytest.mark.parametrize("width", [1, 3])
def test_a_query_that_is_no_number_has_no_answer(name, width, path):
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
    case = known(name, (700, 90, 333), 3) if name in FORMATS else None
    fmt = banded_format(2, 128) if name == "banded" else raw_format("bfloat16", 64)
    case = case or make_case(fmt, [700, 90, 333], 2, 3)
    case = replace(case, q=case.q[:, :, : 2 * width])
    hi = case.view.hi - torch.tensor(
        [[8, 300, 0, 5, 80]]
    )  # queries that see less, and windows
    lo = torch.tensor([[0, 0, 10, 65, 1]]).expand(3, 5).int().contiguous()
    q = torch.randn(3, 5, *case.q.shape[2:], generator=torch.Generator().manual_seed(5))
    case = replace(case.seeing(lo=lo, hi=hi.clamp_min(0).int().contiguous()), q=q)
    together = answer(case)
    view = case.view
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        again = answer(case)
        assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))
    torch.set_num_threads(threads)
    for row in range(3):
        for m in range(5):
            one = slice(row, row + 1)
            some = slice(m, m + 1)
            alone = case.seeing(
                pages=view.pages[one].contiguous(),
                lo=lo[one, some].contiguous(),
                hi=view.hi[one, some].contiguous(),
                segments=None if view.segments is None else view.segments[one],
                owner=None if view.owner is None else view.owner[one],
            )
            o, lse = answer(replace(alone, q=q[one, some].contiguous()))
            assert torch.equal(o[0, 0], together[0][row, m])
            assert torch.equal(lse[0, 0], together[1][row, m])


def test_views_are_attended_in_one_call_as_if_merged(path, monkeypatch):
    pages = make_case(quant_format(4, 64, 32, 32), [130, 64], 2, 3)
    tail = make_case(raw_format("float16", 64), [40, 7], 2, 3)
    other = make_case(
        make_format(v_by="row"), [70, 9], 2, 3
    )  # the library does not know it
    called = []
    call = attend.call
    monkeypatch.setattr(
        attend, "call", lambda *job: (called.append(job[0]), call(*job))
    )
    views = [pages.view, tail.view]
    o = ops.attend(pages.q, views, Softmax(0.2))
    assert called == ["disagg_attend"]
    found = [attend.attend(pages.q, [view], 0.2) for view in views]
    assert torch.allclose(o, softmax.merge(found), atol=1e-6)
    found.append(codes.attend(pages.q, other.view, 0.2))
    o = ops.attend(pages.q, [*views, other.view], Softmax(0.2))
    assert torch.allclose(o, softmax.merge(found), atol=1e-6)


def test_what_the_library_does_not_know_is_left_to_the_reference():
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
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1)[:, 64:] for x in (k, v)]
    yield turned[0], turned[1]
    k = k.clone()
    v = v.clone()
    for i, x in enumerate(
        (torch.inf, -torch.inf, 1e30, -7e4, torch.nan, 1e-9, 6e-8, -0.0)
    ):
        k[0, i + 3, i], v[1, i + 9, i] = x, x
    k[1, :, 7], v[0, 20], v[1, 64:128] = 3.25, 0.0, v[1, 64:128] * 1e4
    k[1, :, 9] += 1000
    k[2], v[2] = k[2] * 1e-6, v[2] * 1e-7
    yield k, v
    yield turned[0] * 0, turned[1] * 0  # of both signs


def test_codes_between_two_are_rounded_as_the_reference_rounds_them(path):
    fmt = quant_format(
        4, 128, 64, 64
    )  # in about one of a million the product's rounding tells
    k, v = torch.randn(
        2, 16, 2048, 128, generator=torch.Generator().manual_seed(2)
    ).half()
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
        wanted, shared = bytes_of(k, v, fmt, 128, frozen)
        assert torch.equal(blocks, wanted)
        assert segments is None if shared is None else torch.equal(segments, shared)


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
        q[0, 3:4, 5], q[5, 4:5, 2] = torch.nan, -torch.inf
        q = q.transpose(0, 1).contiguous().transpose(0, 1) if of_tokens else q
        found = ops.sum_squares(q, 2, begun)
        wanted = encoders.sum_squares(q, 2, begun)
        assert found.shape == (-(-(begun + count) // 16), 2, dim)
        assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1))


def test_threads_and_children_of_a_process_attend_alike():
    fmt = quant_format(4, 64, 32, 32)
    case = make_case(fmt, [900, 400], 4, 2)
    if not is_served(fmt, case.q):
        pytest.skip("no library was built")
    wanted, _ = answer(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    equal = []

    def work():
        equal.extend(torch.equal(answer(case)[0], wanted) for _ in range(20))

    try:
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert equal == [True] * 80
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(answer(case)[0], wanted) else 1)
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
            if (child := os.fork()) == 0:
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_of_a_step_is_appended_and_attended_in_one_call(
    kind, dtype, path, monkeypatch
):
    """As by an append and an attention, in any layer page; what no number holds saturates."""
    raw = raw_format(dtype, 64)
    heads = 2
    rank = 1
    fmt = quant_format(4, 64, 32, 32)
    sealed = make_case(fmt, [130, 64], heads, 3).view
    tail = make_case(raw, [40, 7], heads, 3).view
    pages = torch.stack([tail.pages[0, 2], tail.pages[1, 0]])
    slots = torch.tensor([8, 7]).int()
    arena = torch.cat([sealed.arena, tail.arena])
    shift = sealed.arena.numel() // 128
    tail = replace(tail, arena=arena, pages=tail.pages + shift, hi=tail.hi + 1)
    sealed = replace(sealed, arena=arena)
    pages = pages + shift
    q = torch.randn(6, 2, 64).to(kind)
    k, v = (torch.randn(heads, 2, 64).to(kind) for _ in "kv")
    v[0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    held = getattr(torch, dtype)
    largest = torch.finfo(getattr(torch, dtype)).max
    rows = NewRows(pages, slots, raw, BASE)
    views = [sealed, tail]
    queries = q.transpose(0, 1).float().unsqueeze(1)
    first = [
        replace(x, base=BASE - rank * heads * x.fmt.block_bytes)
        for x in (sealed, tail, rows)
    ]
    ready = ops.prepare(arena, first[2], first[:2], queries)
    calls = []
    call = step.call
    monkeypatch.setattr(step, "call", lambda *job: (calls.append(job[0]), call(*job)))
    before = arena.clone()
    found = ready.run(rank, q, k, v, False, Softmax(0.2))
    written = arena.clone()
    assert calls == ["disagg_step"]
    assert found.dtype is kind
    arena.copy_(before)
    exact = (x.to(held).clamp(-largest, largest).transpose(0, 1) for x in (k, v))
    append(arena, *exact, rows)
    assert torch.equal(arena, written)
    assert torch.equal(found, attend.attend(queries, views, 0.2)[0][:, 0].to(kind))
    assert torch.equal(
        ready.run(rank, q, k.zero_(), v.zero_(), True, Softmax(0.2)), found
    )
    with_sinks = Softmax(0.2, 5.0, torch.linspace(-1, 3, 6))
    expected = ops.attend(queries, views, with_sinks)[:, 0].to(kind)
    assert torch.equal(ready.run(rank, q, k, v, True, with_sinks), expected)
    assert torch.equal(arena, written)


def test_what_points_to_a_format_keeps_it():
    view = known("kivi", (390, 70), 3).view
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
