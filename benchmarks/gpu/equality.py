"""Step 2: does every kernel compute what the torch reference says?

Prompts are encoded, a step of one token seals a page of every sequence and attends, a
step of a few
tokens attends again: on the device in a dirty arena, whose page ids lie far beyond
2**31 bytes, and on a CPU by the reference. The attention is also run over the largest
table of units that a recorded step can have, and its answer must not change.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.gpu import cases
from benchmarks.gpu.cases import Case
from benchmarks.gpu.compiling import Compiles
from benchmarks.gpu.layer import (
    CUDA,
    DirtyArena,
    Layer,
    by_reference,
    interpreted,
    rows_of,
    sinks_of,
    tokens_of,
    widened,
)
from benchmarks.gpu.setting import Setting
from disagg.bench.result import Row
from disagg.codecs import get_codec
from disagg.kernels.gpu.plan import MAX_GRID
from disagg.paged.compressed_kv import GrowingArena
from disagg.paged.doctor import GPU_ATTEND, GPU_BYTES

CPU = torch.device("cpu")
ARENA_BYTES, ROOM_BYTES = 60 << 30, 1 << 29
SPARE_BYTES = 12 << 30  # for all that is not the arena
TINY_ROOM, TINY_GRID = 4 << 20, 12
OUTPUT = {
    "float16": 0.0,
    "bfloat16": 6e-3,
    "float32": 0.0,
}  # what rounding the answer adds


@dataclass(frozen=True)
class Answers:
    """What came of a layer, on the host.

    encoded: K and V that pages stand for after the prompt, and appended: after both
             steps, of each sequence [2, H, n, D] fp64; present: [H, n] bool, what
             codecs did not drop
    o:       attention of each step [N, Hq, D] fp64; grid: that of the first, over more
             units
    ms:      of the first call of each kernel, with its compilation
    """

    encoded: list[Tensor]
    appended: list[Tensor]
    present: list[Tensor]
    o: list[Tensor]
    grid: Tensor
    ms: dict[str, float]


def rows(setting: Setting) -> Iterator[Row]:
    """A row for every case: relative errors beside their bounds, and what was compiled
    for it.
    """
    if setting.rehearsal:
        arena = DirtyArena(torch.empty(TINY_ROOM, dtype=torch.uint8), TINY_ROOM)
        with interpreted():
            for case in rehearsed():
                yield check(case, arena, TINY_GRID)
        return
    free = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    nbytes = min(ARENA_BYTES, free) // 128 * 128
    arena = DirtyArena(torch.empty(nbytes, dtype=torch.uint8, device=CUDA), ROOM_BYTES)
    for case in cases.equality():
        yield check(case, arena, MAX_GRID)


def rehearsed() -> list[Case]:
    """A few cases at a size for the interpreter: with all that a softmax may have, and
    without.
    """
    return cases.tiny(
        [
            Case(cases.KIVI, window=70, cap=2.0, sinks=True),
            Case(cases.RAW),
            Case("fp8", latent=1),
        ]
    )


def check(case: Case, arena: DirtyArena, grid: int) -> Row:
    """Run a case on the device of an arena and by the reference; grid: units at
    most.
    """
    compiles = Compiles()
    row: Row = {"case": case.name, "codec": case.spec}
    try:
        with compiles.counting():
            answers = run(case, arena, grid)
        with by_reference():
            expected = run(case, GrowingArena(CPU), 0)
    except Exception as error:  # of a compiler, say: the next case may do
        return row | {"failure": f"{type(error).__name__}: {error}"[:300]}
    row |= _errors(case, answers, expected)
    row |= {"compiled": compiles.count, "compile_s": compiles.seconds, "ms": answers.ms}
    wrong = [x for x, bound in row["bounds"].items() if not row["errors"][x] <= bound]
    if wrong:
        row["failure"] = f"{', '.join(wrong)} above the bound"
    return row


def run(case: Case, arena: GrowingArena, grid: int) -> Answers:
    """All of a case on the device of an arena."""
    if isinstance(arena, DirtyArena):
        arena.clear()
    device, ms = arena.bytes.device, dict[str, float]()
    layer = Layer(case, arena, CUDA if grid else CPU)
    clock = _Clock(device, ms)
    for row, n in enumerate(layer.n):
        with clock("encode", row == 0):
            layer.write_prompt(*(x.to(device) for x in tokens_of(case, n, row)))
    encoded = [_numbers(layer, row) for row in range(case.sequences)]
    o, widest = [], torch.empty(0)
    for number, m in enumerate((1, layer.block())):
        new = [
            tokens_of(case, m, 100 * (number + 1) + row)
            for row in range(case.sequences)
        ]
        step = layer.plan(m)
        k, v, q = rows_of(new, device)
        with clock("append", number == 0):
            layer.append(step, k, v)
        with clock("attend", number == 0):
            answer = layer.attend(step, q, sinks_of(case, device))
        o.append(answer.cpu().double())
        if not number and step.units is not None:
            wide = widened(step, grid)
            with clock("grid", True):
                answer = layer.attend(wide, q, sinks_of(case, device))
            widest = answer.cpu().double()
    appended = [_numbers(layer, row) for row in range(case.sequences)]
    present = [layer.cache(row).present().cpu() for row in range(case.sequences)]
    return Answers(encoded, appended, present, o, widest, ms)


class _Clock:
    """Milliseconds of blocks, work of the device included."""

    def __init__(self, device: torch.device, ms: dict[str, float]):
        self._device, self._ms, self._name = device, ms, ""

    def __call__(self, name: str, counted: bool) -> "_Clock":
        self._name = name if counted else ""
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._name:
            self._ms[self._name] = round(1e3 * (time.perf_counter() - self._began), 2)


def _numbers(layer: Layer, row: int) -> Tensor:
    """K and V that attention sees: [2, H, n, D]."""
    return filled_up(*layer.cache(row).reconstruct()).cpu().double()


def filled_up(k: Tensor, v: Tensor) -> Tensor:
    """k and v [2, H, n, D]; v of latents has fewer channels, and zeros behind them."""
    return torch.stack([k, pad(v, (0, k.shape[2] - v.shape[2]))])


def _errors(case: Case, answers: Answers, expected: Answers) -> Row:
    """Relative errors, and what they may be."""
    exact = exact_answers(case, answers)
    attend = max(_attend_bound(case), GPU_ATTEND) + OUTPUT[case.dtype]
    errors = {
        "encode": _error(torch.cat(answers.encoded, 2), torch.cat(expected.encoded, 2)),
        "append": _error(
            torch.cat(answers.appended, 2), torch.cat(expected.appended, 2)
        ),
        "attend": _error(answers.o[0], exact[0]),
        "block": _error(answers.o[1], exact[1]),
        "grid": _error(answers.grid, answers.o[0]),
    }
    bounds = {
        "encode": GPU_BYTES,
        "append": GPU_BYTES,
        "attend": attend,
        "block": attend,
    }
    return {"errors": errors, "bounds": bounds | {"grid": GPU_ATTEND}}


def _attend_bound(case: Case) -> float:
    return float(get_codec(case.spec, case.head_dim).attend_error)


def _error(values: Tensor, expected: Tensor) -> float:
    if values.shape != expected.shape:
        return torch.inf
    return float((values - expected).norm() / expected.norm())


def exact_answers(case: Case, answers: Answers) -> list[Tensor]:
    """What attention over the pages of `answers` should be: of each step [N, Hq, D] fp64."""
    layer = Layer(case, GrowingArena(torch.device("meta")))
    exact = []
    for number, m in enumerate((1, layer.block())):
        parts = []
        for row in range(case.sequences):
            kv, present = answers.appended[row], answers.present[row]
            q = tokens_of(case, m, 100 * (number + 1) + row)[2].double()
            end = kv.shape[2] - (layer.block() if not number else 0)
            parts.append(exact_attention(case, q, kv[:, :, :end], present[:, :end]))
        layer.n = [n + m for n in layer.n]
        exact.append(torch.cat(parts, 1).transpose(0, 1))
    return exact


def exact_attention(case: Case, q: Tensor, kv: Tensor, present: Tensor) -> Tensor:
    """Attention of q [Hq, W, D], of the last W tokens, over kv [2, H, n, D]: [Hq, W, D]
    fp64; of latents these channels alone.
    """
    (width, dim), (heads, n) = q.shape[1:], present.shape
    places = torch.arange(n, device=kv.device)
    ages = places[n - width :, None] - places
    visible = (ages >= 0) & (ages < (case.window or n))
    scores = (
        torch.einsum("hgwd,hnd->hgwn", q.unflatten(0, (heads, -1)), kv[0]) * dim**-0.5
    )
    if case.cap:
        scores = case.cap * torch.tanh(scores / case.cap)
    scores = scores.masked_fill(~(visible & present[:, None, None]), -torch.inf)
    sinks = sinks_of(case, kv.device)
    if sinks is not None:
        extra = sinks.double().view(heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], 3)
    p = scores.softmax(3)[..., :n]
    o = torch.einsum("hgwn,hnd->hgwd", p, kv[1]).flatten(0, 1)
    return o[..., : case.latent or dim]


def headline(rows: list[Row]) -> list[str]:
    """How many are sound, the largest errors, and what was compiled."""
    sound = [row for row in rows if "failure" not in row]
    lines = [f"{len(sound)} of {len(rows)} cases sound"]
    if sound:
        worst = max(sound, key=lambda row: row["errors"]["attend"])
        lines[0] += (
            f"; attention off by {worst['errors']['attend']:.1e} at most ({worst['codec']})"
        )
        count = sum(row["compiled"] for row in sound)
        seconds = sum(row["compile_s"] for row in sound)
        lines.append(f"{count} kernels compiled here, {seconds:.0f} s")
    return lines
