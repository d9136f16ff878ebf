"""The C library of a CPU: loading it, choosing one of its paths, formats as it reads them.

It is built with the package where there is a C compiler; without one the torch reference computes.
Knows ctypes and pages.h; the calls are in attend.py, encode.py, append.py,
step.py, rows.py, exact.py and meeting.py.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from disagg.kernels.formats import ExactFormat, PageFormat, Side, value_dim

PATHS = ("cpu-c", "cpu-avx2", "cpu-avx512vnni")  # from the plainest to the fastest
TORCH = "torch"
# relative errors of attention, against exact attention on the decoded pages: over codes the library
# rounds queries and weights to int16; everything else is fp32
EXACT_ERRORS = dict.fromkeys((TORCH, *PATHS), 1e-5)
CODE_ERRORS = {TORCH: 1e-5, **dict.fromkeys(PATHS, 5e-4)}
BY = {"column": 0, "row": 1, "block": 2}
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
NO_TYPE = 4
MAX_BANDS = 3
STRIP_PAGES = 4  # pages with one softmax, counted from the first of a table
BUILD = "python setup.py build_ext --inplace --force"
PROCESS = os.getpid()

_forced: list[str] = []


def _structure(name: str, spec: str, **others: type) -> type[ctypes.Structure]:
    """A struct of pages.h: int64 numbers (`name`) and pointers (`*name`), then the others."""
    fields: list[tuple[str, type]] = []
    for field in spec.split():
        if field.startswith("*"):
            fields.append((field.removeprefix("*"), ctypes.c_void_p))
        else:
            fields.append((field, ctypes.c_int64))
    fields.extend(others.items())
    return type(name, (ctypes.Structure,), {"_fields_": fields})


SideC = _structure(
    "SideC",
    "rows columns bits codes by group scale zero center shared rank a b slots index delta block "
    "matrix floating fitted",
)
FormatC = _structure(
    "FormatC",
    "tokens head_dim block_bytes segment_bytes valid raw raw_k raw_v order signs bands latent "
    "value_dim",
    v=SideC,
    k=SideC * MAX_BANDS,
)
TableC = _structure(
    "TableC",
    "*format *arena *pages *lo *hi *segments *owner num_pages num_segments base segment_base",
)
EncodingC = _structure(
    "EncodingC",
    "*format *k *v k_head k_token v_head v_token type tokens heads *blocks *segments *pages base "
    "unit segment_tokens",
)
SquaresC = _structure(
    "SquaresC", "*q *sums q_head q_token type tokens begun heads width head_dim"
)
AppendC = _structure(
    "AppendC",
    "*arena *k *v *pages *slots rows heads k_row k_head v_row v_head type *format base layer",
)
AttentionC = _structure(
    "AttentionC",
    "*tables *q *o *lse num_tables batch m heads width head_dim type q_row q_head layer ahead",
    scale=ctypes.c_float,
    cap=ctypes.c_float,
)
StepC = _structure("StepC", "", append=AppendC, attention=AttentionC)
NormC = _structure(
    "NormC",
    "*x *more *weight *sum *out rows columns x_row more_row type",
    epsilon=ctypes.c_float,
    factor=ctypes.c_float,
)
RotationC = _structure("RotationC", "*x *cosines *sines rows heads head_dim x_row type")
GateC = _structure("GateC", "*x *out rows columns x_row type")
ExactC = _structure(
    "ExactC",
    "*q *k *v *out count total heads width head_dim q_head q_row k_head k_row v_head v_row "
    "out_head out_row",
    scale=ctypes.c_float,
)
MeetingC = _structure("MeetingC", "*counters rank ranks number wait_ns late")
STRUCTURES = (
    SideC,
    FormatC,
    TableC,
    EncodingC,
    SquaresC,
    AppendC,
    AttentionC,
    StepC,
    NormC,
    RotationC,
    GateC,
    ExactC,
    MeetingC,
)
CALLS = (
    "attend",
    "encode",
    "append",
    "step",
    "sum_squares",
    "norm",
    "rotate",
    "gate",
    "attend_exact",
    "arrive",
    "meet",
)


@cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it was not built, or from other sources than these."""
    for library in _built():
        if not _fits(library):
            continue
        library.disagg_path.restype = ctypes.c_char_p
        library.disagg_path.argtypes = [ctypes.c_int64]
        for name in CALLS:
            function = getattr(library, f"disagg_{name}")
            function.restype = None
            function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        return library
    return None


def _built() -> Iterator[ctypes.CDLL]:
    """The libraries that were built here."""
    for path in sorted(Path(__file__).parent.glob("_pages*.so")):
        with suppress(OSError):  # of another machine
            yield ctypes.CDLL(str(path))


def _fits(library: ctypes.CDLL) -> bool:
    """Whether a library has structs of the same sizes; an older one would read past their ends."""
    size_of = getattr(library, "disagg_size", None)
    if size_of is None:
        return False
    size_of.restype = ctypes.c_int64
    size_of.argtypes = [ctypes.c_int64]
    sizes = [*map(ctypes.sizeof, STRUCTURES), 0]
    return all(size_of(i) == size for i, size in enumerate(sizes))


@cache
def paths() -> tuple[str, ...]:
    """The paths that this machine can run, the fastest last; none where nothing was built."""
    library = load()
    if library is None:
        return ()
    return tuple(name for i, name in enumerate(PATHS) if library.disagg_path(i))


@cache
def has_amx() -> bool:
    """Whether this machine has matrix units for bfloat16 that the library may use."""
    library = load()
    if library is None:
        return False
    library.disagg_has_amx.restype = ctypes.c_int64
    return bool(library.disagg_has_amx())


def backend() -> str:
    """What computes attention and encodes on a CPU: one of PATHS, or "torch"."""
    if _forced:
        return _forced[-1]
    available = paths()
    return available[-1] if available else TORCH


def describe_backend() -> str:
    """What computes on this CPU, in words."""
    if paths():
        return backend()
    reason = "no C library"
    if not all(map(_fits, _built())):
        reason = f"the C library is of another version (`{BUILD}` builds this one)"
    return f"torch: {reason}, the reference serves"


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Compute by this backend, even if this machine has a faster one; for tests and benchmarks."""
    if name != TORCH and name not in paths():
        available = ", ".join((TORCH, *paths()))
        raise ValueError(f"this machine cannot run {name!r}; it can run {available}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def call(name: str, job: ctypes.Structure) -> None:
    """Run a job on as many threads as torch uses; on one in a forked child, which has no others."""
    library = load()
    assert library is not None
    path = PATHS.index(backend())
    threads = torch.get_num_threads() if os.getpid() == PROCESS else 1
    getattr(library, name)(path, ctypes.addressof(job), threads)


def address(x: Tensor | None) -> int | None:
    """The address of a tensor's numbers; None for no tensor."""
    return None if x is None else x.data_ptr()


@lru_cache(maxsize=256)
def format_of(fmt: PageFormat | ExactFormat) -> ctypes.Structure:
    """A format as the library reads it; hold it while the library uses its address."""
    if isinstance(fmt, ExactFormat):
        return FormatC(
            tokens=fmt.tokens,
            head_dim=fmt.head_dim,
            block_bytes=fmt.block_bytes,
            valid=-1,
            raw=TYPES[getattr(torch, fmt.dtype)],
            raw_k=fmt.k,
            raw_v=fmt.k if fmt.v is None else fmt.v,
            order=-1,
            signs=-1,
            latent=fmt.latent or 0,
            value_dim=value_dim(fmt),
        )
    segment_bytes = fmt.block_bytes if fmt.has_own_basis else fmt.segment_bytes
    k_sides = (SideC * MAX_BANDS)(*[_side_of(side) for side in fmt.k_sides])
    return FormatC(
        tokens=fmt.tokens,
        head_dim=fmt.head_dim,
        block_bytes=fmt.block_bytes,
        segment_bytes=segment_bytes,
        valid=-1 if fmt.valid is None else fmt.valid,
        raw=NO_TYPE,
        order=fmt.hadamard.order if fmt.hadamard else -1,
        signs=fmt.hadamard.signs if fmt.hadamard else -1,
        bands=len(fmt.k_sides),
        latent=fmt.latent or 0,
        value_dim=value_dim(fmt),
        v=_side_of(values_of(fmt)),
        k=k_sides,
    )


def values_of(fmt: PageFormat) -> Side:
    """The side that values are read from: V, or of latents K lying, as far as it is values."""
    if fmt.v is not None:
        return fmt.v
    side = fmt.k.lying
    if side.scale.by != "column":
        return side
    groups = -(-value_dim(fmt) // side.scale.group)
    return replace(side, rows=groups * side.scale.group)


def _side_of(side: Side) -> ctypes.Structure:
    scale = side.scale
    table = SideC(
        rows=side.rows,
        columns=side.columns,
        bits=side.bits,
        codes=side.codes,
        by=BY[scale.by],
        group=scale.group,
        scale=scale.scale,
        zero=-1 if scale.zero is None else scale.zero,
        center=scale.center,
        shared=scale.shared,
        floating=side.floating,
        fitted=scale.fitted,
    )
    if side.low_rank:
        table.rank = side.low_rank.rank
        table.a = side.low_rank.a
        table.b = side.low_rank.b
    if side.sparse:
        table.slots = side.sparse.slots
        table.index = side.sparse.index
        table.delta = side.sparse.delta
    if side.rotation:
        table.block = side.rotation.block
        table.matrix = side.rotation.matrix
    return table
