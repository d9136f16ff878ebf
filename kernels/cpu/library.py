"""The C library of a CPU: where it is, which of its paths runs here, formats as it reads them.

It is built with the package where there is a C compiler; without one the torch reference serves.
Knows ctypes and pages.h; what is computed is in attend.py and encode.py.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from disagg.kernels.formats import ExactFormat, PageFormat, Side

PATHS = ("cpu-c", "cpu-avx2", "cpu-avx512vnni")  # from the plainest to the fastest
TORCH = "torch"
# relative, of attention against exact attention on what pages stand for: over codes the library
# rounds queries and weights to int16, all else is fp32
EXACT_ERRORS = dict.fromkeys((TORCH, *PATHS), 1e-5)
CODE_ERRORS = {**EXACT_ERRORS, **dict.fromkeys(PATHS, 5e-4)}
BY = {"column": 0, "row": 1, "block": 2}
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
NO_TYPE = 4
MAX_BANDS = 3
STRIP_PAGES = 4  # whose softmax is taken together, counted from the first of a table
PROCESS = os.getpid()

_forced: list[str] = []


def _structure(name: str, spec: str, **more: type) -> type[ctypes.Structure]:
    """A struct of pages.h: of int64 and of pointers (`*name`), and what comes after them."""
    fields: list[tuple[str, type]] = []
    for field in spec.split():
        kind = ctypes.c_void_p if field.startswith("*") else ctypes.c_int64
        fields.append((field.lstrip("*"), kind))
    return type(name, (ctypes.Structure,), {"_fields_": [*fields, *more.items()]})


SideC = _structure(
    "SideC",
    "rows columns bits codes by group scale zero center shared rank a b slots index delta turn "
    "matrix floating fitted",
)
FormatC = _structure(
    "FormatC",
    "tokens head_dim block_bytes segment_bytes valid raw raw_k raw_v order signs bands",
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


@cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it was not built."""
    for path in sorted(Path(__file__).parent.glob("_pages*.so")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # of another machine
            continue
        library.disagg_path.restype = ctypes.c_char_p
        library.disagg_path.argtypes = [ctypes.c_int64]
        for name in ("attend", "encode", "append", "step", "sum_squares"):
            call = getattr(library, f"disagg_{name}")
            call.restype, call.argtypes = (
                None,
                [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64],
            )
        return library
    return None


@cache
def paths() -> tuple[str, ...]:
    """The paths that this machine can run, the fastest last; none where nothing was built."""
    library = load()
    if library is None:
        return ()
    return tuple(name for i, name in enumerate(PATHS) if library.disagg_path(i))


def backend() -> str:
    """What computes attention and encodes on a CPU: one of PATHS, or "torch"."""
    return _forced[-1] if _forced else paths()[-1] if paths() else TORCH


def describe_backend() -> str:
    """What computes on this CPU, in words."""
    return backend() if paths() else "torch: no C library, the reference serves"


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Compute by this backend, whatever this machine could do better; for tests and benchmarks."""
    if name != TORCH and name not in paths():
        known = ", ".join((TORCH, *paths()))
        raise ValueError(f"this machine cannot run {name!r}; it can run {known}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def call(name: str, job: ctypes.Structure) -> None:
    """Run a job on the threads that torch may use; a child has none of its parent's threads."""
    library = load()
    assert library is not None
    path = PATHS.index(backend())
    threads = torch.get_num_threads() if os.getpid() == PROCESS else 1
    getattr(library, name)(path, ctypes.addressof(job), threads)


def address(x: Tensor | None) -> int | None:
    """Where the numbers of a tensor begin."""
    return None if x is None else x.data_ptr()


@lru_cache(maxsize=256)
def format_of(fmt: PageFormat | ExactFormat) -> ctypes.Structure:
    """A format as the library reads it; who gives its address away holds it meanwhile."""
    if isinstance(fmt, ExactFormat):
        kind = TYPES[getattr(torch, fmt.dtype)]
        sizes = (fmt.tokens, fmt.head_dim, fmt.block_bytes, 0, -1)
        return FormatC(*sizes, kind, fmt.k, fmt.v, -1, -1)
    valid = -1 if fmt.valid is None else fmt.valid
    sides = (SideC * MAX_BANDS)(*map(_side_of, fmt.k_sides))
    turn = (fmt.hadamard.order, fmt.hadamard.signs) if fmt.hadamard else (-1, -1)
    shared = fmt.block_bytes if fmt.has_own_basis else fmt.segment_bytes
    sizes = (fmt.tokens, fmt.head_dim, fmt.block_bytes, shared, valid)
    return FormatC(
        *sizes, NO_TYPE, 0, 0, *turn, len(fmt.k_sides), _side_of(fmt.v), sides
    )


def _side_of(side: Side) -> ctypes.Structure:
    scale, low, sparse, turn = side.scale, side.low_rank, side.sparse, side.rotation
    return SideC(
        *(side.rows, side.columns, side.bits, side.codes),
        *(
            BY[scale.by],
            scale.group,
            scale.scale,
            -1 if scale.zero is None else scale.zero,
        ),
        *(scale.center, scale.shared),
        *((low.rank, low.a, low.b) if low else (0, 0, 0)),
        *((sparse.slots, sparse.index, sparse.delta) if sparse else (0, 0, 0)),
        *((turn.block, turn.matrix) if turn else (0, 0)),
        *(side.floating, scale.fitted),
    )
