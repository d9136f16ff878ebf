"""Step 3: attention of a decode step on compressed pages, beside the best that torch
has at fp16.

    python -m benchmarks.gpu.attention SPEC ...     each attended once, for a profiler around it

One layer of an 8B model: all that a step reads, tails included, in records that lie in
no order. Every call is a CUDA graph that begins with a cold L2 cache; codecs and
baselines run by turns. Kernels of fewer registers a thread, so of more warps, stand
beside the one that is served.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.gpu import cases
from benchmarks.gpu.cases import Case
from benchmarks.gpu.compiling import Compiles
from benchmarks.gpu.environment import copy_speed
from benchmarks.gpu.equality import exact_attention, filled_up
from benchmarks.gpu.layer import (
    CUDA,
    DirtyArena,
    Layer,
    interpreted,
    registers,
    tokens_of,
)
from benchmarks.gpu.setting import Setting
from disagg.bench.inputs import make_prompt
from disagg.bench.kernels import SPECS, _try_capture, time_cpu, time_cuda
from disagg.bench.result import Row

SHAPES = ((32, 8192), (1, 131072), (8, 2048))  # sequences x tokens
TINY_SHAPES = ((1, 64),)
TINY_SPECS = (cases.RAW,)
SERVED = "as served"  # registers
LATENT_SPECS = tuple(dict.fromkeys(case.spec for case in cases.latents()))
PROFILED = (cases.KIVI, cases.BANDED, cases.RAW)
ARENA_BYTES = {"cuda": 3 << 30, "cpu": 8 << 20}
RUNS = {"cuda": 15, "cpu": 1}
PROFILE_S = 40.0
METRICS = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "microseconds": "gpu__time_duration.sum",
}

Call = Callable[[], object]


@dataclass(frozen=True)
class Fp16:
    """The same tokens uncompressed: q [B, Hq, D], k and v [B, H, n, D], fp16 on the
    device.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    def calls(self) -> dict[str, Call]:
        """What torch has that runs here, by name; flex apart, for it takes long to
        compile.
        """
        heads = self.k.shape[1]
        by_group = self.q.unflatten(
            1, (heads, -1)
        ).contiguous()  # queries of a head as its rows
        by_head = self.q.unsqueeze(2).contiguous()
        flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
        calls: dict[str, Call] = {
            "flash": partial(self._sdpa, by_group, flash),
            "flash gqa": partial(self._sdpa, by_head, flash),
            "cudnn": partial(self._sdpa, by_group, cudnn),
            "cudnn gqa": partial(self._sdpa, by_head, cudnn),
        }
        if self.k.device.type != "cuda":
            calls = {"math": partial(sdpa, by_group, self.k, self.v)}
        return {name: call for name, call in calls.items() if _runs(call)}

    def _sdpa(self, q: Tensor, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, self.k, self.v, enable_gqa=q.shape[1] != self.k.shape[1])

    def flex(self) -> Call:
        """Flex attention, compiled."""
        torch.compiler.reset()  # or a shape before would make this one a dynamic shape
        attend = torch.compile(flex_attention, dynamic=False)
        by_head = self.q.unsqueeze(2).contiguous()
        return partial(attend, by_head, self.k, self.v, enable_gqa=True)


def _runs(call: Call) -> bool:
    """Whether a call is possible here; one refuses this shape or chip, or lacks its
    compiler.
    """
    with suppress(RuntimeError, ImportError, ValueError, OSError):
        call()
        return True
    return False


@dataclass(frozen=True)
class Attending:
    """A codec at a shape, ready to attend: one more token of every sequence is
    appended.

    error: relative, of the first sequence, against fp64 attention on what its pages
           stand for
    """

    call: Call
    nbytes: int
    error: float


def prepare(
    case: Case, arena: DirtyArena, kvq: tuple[Tensor, Tensor, Tensor]
) -> Attending:
    """Write the prompts of a case and plan its next step; kvq: k, v [H, n, D] and q
    [Hq, _, D].
    """
    arena.clear()
    layer, (k, v, q) = Layer(case, arena), kvq
    layer.scatter()
    assert max(layer.n) <= k.shape[1], (case, layer.n)
    for n in layer.n:
        layer.write_prompt(k[:, :n], v[:, :n], q)
    step = layer.plan(1)
    new_k, new_v = (
        x[:, :1].expand(-1, case.sequences, -1).transpose(0, 1) for x in (k, v)
    )
    layer.append(step, new_k, new_v)
    new_q = queries_of(q, case.sequences)
    call = partial(layer.attend, step, new_q)
    output = call()[0].cpu().double()
    kv = filled_up(*layer.cache(0).reconstruct()).double()
    present = layer.cache(0).present()
    exact = _exact(case, new_q[0], kv, present).cpu()
    return Attending(call, layer.nbytes, float((output - exact).norm() / exact.norm()))


def _exact(case: Case, q: Tensor, kv: Tensor, present: Tensor) -> Tensor:
    """Attention of one query [Hq, D] over all tokens: [Hq, D] fp64."""
    return exact_attention(case, q.double()[:, None], kv, present)[:, 0]


def queries_of(q: Tensor, sequences: int) -> Tensor:
    """A query of each sequence [B, Hq, D], from the last ones of a prompt [Hq, W,
    D].
    """
    rows = torch.arange(sequences, device=q.device) % q.shape[1]
    return q[:, rows].transpose(0, 1).contiguous()


def rows(setting: Setting) -> Iterator[Row]:
    """A row for every codec, shape and number of registers; then flex, then what a
    profiler saw.

    microseconds: medians · gb_per_s: of all bytes that the step reads · of_copy: share
    of what a copy moves · ratio: how many times faster than the best baseline that ran
    beside it
    """
    with interpreted() if setting.rehearsal else nullcontext():
        yield from _compare(setting)
        yield from _compare_latents(setting)
    yield from profile(setting)


def _compare(setting: Setting) -> Iterator[Row]:
    device, kind = setting.device, setting.device.type
    arena = _arena(kind)
    copied, late = copy_speed(device), list[tuple[str, Fp16]]()
    for sequences, tokens in TINY_SHAPES if setting.rehearsal else SHAPES:
        kvq = make_inputs(tokens + 512, setting.rehearsal, device)
        k, v = (
            x[:, :tokens].expand(sequences, -1, -1, -1).contiguous()
            for x in (kvq[0], kvq[1])
        )
        fp16 = Fp16(queries_of(kvq[2], sequences), k, v)
        baselines = {name: _captured(call, kind) for name, call in fp16.calls().items()}
        shape = f"{sequences}x{tokens}"
        for spec, most in _variants(setting.rehearsal):
            if setting.seconds_left < 0:
                return
            case = _case(spec, sequences, tokens, setting.rehearsal)
            with registers(most):
                yield _measure(case, most, shape, arena, kvq, baselines, copied)
        late.append((shape, fp16))
    for shape, one in late:
        if setting.seconds_left > 0 and kind == "cuda":
            yield _flex(shape, one)


def _compare_latents(setting: Setting) -> Iterator[Row]:
    """Codecs of DeepSeek's latents beside products of torch, at the first shape."""
    device, kind = setting.device, setting.device.type
    sequences, tokens = (TINY_SHAPES if setting.rehearsal else SHAPES)[0]
    case = cases.latents()[0]
    if setting.rehearsal:
        case = cases.tiny([case])[0]
    case = replace(case, sequences=sequences, spread=0)
    k, v, q = (x.to(device) for x in tokens_of(case, tokens + 512, 0))
    arena, copied = _arena(kind), copy_speed(device)
    rows = k[0, :tokens].expand(sequences, -1, -1).contiguous()
    product = partial(_attend_by_products, queries_of(q, sequences), rows, case)
    baselines = {"products": _captured(product, kind)}
    for spec in (cases.RAW,) if setting.rehearsal else LATENT_SPECS:
        if setting.seconds_left < 0:
            return
        one = replace(case, spec=spec, pages=1)
        layer = Layer(one, DirtyArena(torch.empty(256, dtype=torch.uint8), 128))
        one = replace(one, pages=max(1, tokens // layer.group.page.tokens))
        shape = f"{sequences}x{tokens} latents"
        yield _measure(one, None, shape, arena, (k, v, q), baselines, copied)


def _attend_by_products(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """Attention of q [B, Hq, D] over latents k [B, n, D] by two products of matrices."""
    scores = q @ k.transpose(1, 2) * case.head_dim**-0.5
    return scores.softmax(2) @ k[..., : case.latent]


def _arena(kind: str) -> DirtyArena:
    nbytes = ARENA_BYTES[kind]
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=kind)
    return DirtyArena(tensor, nbytes - 128)  # page 0 stays free


def make_inputs(
    tokens: int, rehearsal: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    heads, per_head, dim = (1, 2, 64) if rehearsal else (8, 4, 128)
    prompt = make_prompt(tokens, heads, dim, per_head)
    return prompt.k.to(device), prompt.v.to(device), prompt.q.to(device)


def _case(spec: str, sequences: int, tokens: int, rehearsal: bool) -> Case:
    case = Case(spec, sequences=sequences, spread=0)
    if rehearsal:
        case = cases.tiny([case])[0]
    layer = Layer(case, DirtyArena(torch.empty(256, dtype=torch.uint8), 128))
    pages = max(1, tokens // layer.group.page.tokens)
    return Case(**vars(case) | {"sequences": sequences, "pages": pages})


def _variants(rehearsal: bool) -> list[tuple[str, int | None]]:
    if rehearsal:
        return [(x, most) for x in TINY_SPECS for most in (None, cases.REGISTERS[0])]
    more = [(x, most) for x in cases.REGISTER_SPECS for most in cases.REGISTERS]
    first = [(x, None) for x in cases.REGISTER_SPECS]
    return [*first, *more, *((x, None) for x in SPECS if x not in cases.REGISTER_SPECS)]


def _measure(
    case: Case,
    most: int | None,
    shape: str,
    arena: DirtyArena,
    kvq: tuple[Tensor, Tensor, Tensor],
    baselines: dict[str, Call],
    copied: float,
) -> Row:
    row: Row = {"codec": case.spec, "shape": shape, "registers": most or SERVED}
    kind, compiles = arena.bytes.device.type, Compiles()
    try:
        with compiles.counting():
            ready = prepare(case, arena, kvq)
        call = _captured(ready.call, kind)
        timer = time_cuda if kind == "cuda" else time_cpu
        ours, *times = timer([call, *baselines.values()], RUNS[kind])
    except Exception as error:
        return row | {"failure": f"{type(error).__name__}: {error}"[:300]}
    best = min(times)
    return row | {
        "microseconds": ours,
        "gb_per_s": ready.nbytes / ours / 1e3,
        "of_copy": ready.nbytes / ours / 1e3 / copied,
        "baseline": list(baselines)[times.index(best)],
        "baseline_microseconds": best,
        "baselines": dict(zip(baselines, times, strict=True)),
        "ratio": best / ours,
        "captured": call is not ready.call,
        "error": ready.error,
        "compiled": compiles.count,
    }


def _captured(call: Call, kind: str) -> Call:
    return _try_capture(call)[0] if kind == "cuda" else call


def _flex(shape: str, fp16: Fp16) -> Row:
    row: Row = {"codec": "fp16", "shape": shape, "baseline": "flex"}
    try:
        call = fp16.flex()
        call()
        (microseconds,) = time_cuda([_captured(call, "cuda")], RUNS["cuda"])
    except Exception as error:  # a baseline that this torch has not: no failure of ours
        return row | {"reason": f"{type(error).__name__}: {error}"[:200]}
    return row | {"microseconds": microseconds}


# -- with a profiler


def profile(setting: Setting) -> Iterator[Row]:
    """Shares of the peaks, of attention with three codecs at the first shape."""
    command = [sys.executable, "-m", "benchmarks.gpu.attention", *PROFILED]
    if setting.rehearsal:
        with interpreted():
            attend_once(TINY_SPECS, rehearsal=True)
        return
    if shutil.which("ncu") is None or setting.seconds_left < 10:
        return
    ncu = [
        "ncu",
        "--csv",
        "--clock-control",
        "none",
        "--kernel-name",
        "regex:attend_kernel",
    ]
    ncu += ["--metrics", ",".join(METRICS.values())]
    seconds = min(PROFILE_S, setting.seconds_left)
    try:
        done = subprocess.run(
            [*ncu, *command],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=os.environ,
        )
    except subprocess.TimeoutExpired:
        yield {"profiled": "ncu", "reason": f"not done after {seconds:.0f} s"}
        return
    print(done.stderr, done.stdout[-4000:])
    yield from read_profile(done.stdout, PROFILED)


def attend_once(specs: Sequence[str], rehearsal: bool = False) -> None:
    """Attend once with each codec: `prepare` does."""
    device = torch.device("cpu") if rehearsal else CUDA
    arena = _arena(device.type)
    sequences, tokens = (TINY_SHAPES if rehearsal else SHAPES)[0]
    kvq = make_inputs(tokens + 512, rehearsal, device)
    for spec in specs:
        prepare(_case(spec, sequences, tokens, rehearsal), arena, kvq)


def read_profile(text: str, specs: Sequence[str]) -> Iterator[Row]:
    """A row for each launch of attention that ncu lists as CSV, in the order of
    codecs.
    """
    start = re.search(r'^"ID"', text, re.MULTILINE)
    if start is None:
        yield {"profiled": "ncu", "reason": "no table in its output"}
        return
    launches: dict[str, Row] = {}
    for line in csv.DictReader(text[start.start() :].splitlines()):
        row = launches.setdefault(line["ID"], {})
        for name, metric in METRICS.items():
            if line["Metric Name"] == metric:
                row[name] = float(line["Metric Value"].replace(",", ""))
                if name == "microseconds" and line["Metric Unit"] in ("nsecond", "ns"):
                    row[name] /= 1e3
    for spec, row in zip(specs, launches.values(), strict=False):
        yield {"profiled": spec, **row}


def headline(rows: list[Row]) -> list[str]:
    """The codecs that gain most and least, what other registers do, shares of peaks."""
    timed = [row for row in rows if "ratio" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in timed))
    lines = [_gains_at(shape, timed) for shape in shapes]
    if shapes:
        lines += _register_lines([row for row in timed if row["shape"] == shapes[0]])
    return lines + [str(row) for row in rows if "profiled" in row]


def _gains_at(shape: str, timed: list[Row]) -> str:
    """The three best codecs at a shape, and the worst."""
    served = [
        row for row in timed if row["shape"] == shape and row["registers"] == SERVED
    ]
    served.sort(key=lambda row: -row["ratio"])
    gains = dict.fromkeys(map(_gain, [*served[:3], *served[-1:]]))
    return f"{shape}: {', '.join(gains)} (times a baseline, share of a copy)"


def _register_lines(timed: list[Row]) -> list[str]:
    """Microseconds of each codec that ran with other numbers of registers."""
    specs = [row["codec"] for row in timed if row["registers"] != SERVED]
    lines = []
    for spec in dict.fromkeys(specs):
        times = [
            f"{row['registers']} {row['microseconds']:.0f}"
            for row in timed
            if row["codec"] == spec
        ]
        lines.append(f"{spec}, us by registers: {', '.join(times)}")
    return lines


def _gain(row: Row) -> str:
    return f"{row['codec']} {row['ratio']:.2f}x {row['of_copy']:.0%}"


if __name__ == "__main__":
    attend_once(sys.argv[1:])
