"""`disagg bench kernels`: what attention and encoding cost, on a CPU or a GPU, or on paper.

Attention is a decode step of one layer on codes, beside fp16 in the same process; encoding is that
of one layer, beside a copy. Everything is measured by turns, so that a busy machine is busy for
all. On a GPU each call of attention is a CUDA graph that begins with a cold L2 cache, after a check
of what must be right; on a CPU the code runs that runs in service. Machine code needs no GPU.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from disagg.bench.inputs import (
    LAYER,
    PagedLayer,
    StepShape,
    check_device,
    in_huge_pages,
    make_layer,
    make_prompt,
)
from disagg.bench.machine_code import LOOPS, OTHERS, TARGETS, compile_all
from disagg.bench.result import Row, result_of, tell
from disagg.codecs import get_codec
from disagg.codecs.contract import Prompt, Queries
from disagg.errors import UnknownNameError
from disagg.kernels.cpu import library
from disagg.paged.doctor import examine

SPECS = (
    *("banded:bits=3", "banded:bits=2"),
    *("kivi:bits=4,group=64", "kivi:bits=2,group=64"),
    *(f"gear-l:bits={bits},backbone=kivi,group=64" for bits in (4, 2)),
    "gear:bits=2,backbone=kivi,group=64",
    *[
        "int8",
        "fp8",
        "kcvt",
        "pertoken",
        "decoquant",
        "ott",
        "h2o",
        "alignedkv",
        "raw:dtype=fp16",
    ],
)
CUDA_SIZES = ((1, 4096), (1, 131072), (32, 8192), (64, 4096), (8, 32768))
SHAPES = {
    "cpu": (StepShape(1, 8192), StepShape(8, 2048)),
    "cuda": tuple(StepShape(*size) for size in CUDA_SIZES),
}
# on a CPU also: shapes with other heads, and the paths of the C library that serve other machines
FEW_SPECS = (*("kivi:bits=4,group=64", "kivi:bits=2,group=64"), "banded:bits=2", "int8")
OTHER_HEADS = ((4, 64), (1, 128), (1, 64))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ENCODE_HEADS, ENCODE_TOKENS = 8, {"cpu": 2048, "cuda": 8192}
COLD_BYTES = 256 << 20  # more than any L2 cache
NOTES = {
    "machine-code": "instructions of a thread for each element of K and V; no chip was needed",
    "cpu": "a layer of a decode step on a CPU, against torch SDPA, one thread, medians by turns",
    "cuda": "CUDA graphs, cold L2, medians by turns; what torch runs is not captured",
}

Call = Callable[[], object]
Timer = Callable[[Sequence[Call], int], list[float]]


@dataclass(frozen=True)
class KernelOptions:
    """What is asked for; runs: medians are of this many; no shapes: those of the device."""

    device: str = "cpu"
    runs: int = 15
    specs: Sequence[str] = SPECS
    shapes: Sequence[StepShape] = ()


def read_machine_code(targets: Sequence[str] = tuple(TARGETS)) -> Row:
    """What compilers for chips made of the kernels; UnknownNameError for a target that is none."""
    if unknown := set(targets) - set(TARGETS):
        raise UnknownNameError.of("target", min(unknown), TARGETS)
    rows, others = (compile_all(kernels, targets) for kernels in (LOOPS, OTHERS))
    return result_of(rows, NOTES["machine-code"], others=others)


def run(options: KernelOptions) -> Row:
    """The result as a JSON object; ConfigError for a device that is not there."""
    check_device(options.device, "--machine-code needs none")
    device = torch.device(options.device)
    more: Row = {}
    if device.type == "cuda":
        checks = (examine(spec, 2, 128, device) for spec in options.specs)
        more["checks"] = [asdict(found) for some in checks for found in some]
        more["gpu"] = torch.cuda.get_device_name(device)
    else:
        torch.set_num_threads(
            1
        )  # as in a worker; and a second core is not always there
        more["baselines"] = {name: is_runnable(name) for name in DTYPES}
    copied = copy_speed(device, options.runs)
    told = tell(
        cases_of(options, device), lambda case: f"attention, {case[0]}, {case[1].name}"
    )
    attend = []
    for spec, shape, path in told:
        with library.forced(path):
            attend.append(measure_attend(spec, shape, device, options.runs, copied))
    encode = measure_encode(
        options.specs, device, options.runs, ENCODE_TOKENS[device.type]
    )
    return result_of(attend, NOTES[device.type], **more, encode=encode)


def cases_of(
    options: KernelOptions, device: torch.device
) -> list[tuple[str, StepShape, str]]:
    """What is measured: a spec, at a shape, by a backend of the CPU."""
    shapes, best = options.shapes or SHAPES[device.type], library.backend()
    cases = [(spec, shape, best) for shape in shapes for spec in options.specs]
    if options.shapes or device.type == "cuda":
        return cases
    others = [
        replace(shape, per_head=per_head, head_dim=head_dim)
        for shape in shapes
        for per_head, head_dim in OTHER_HEADS
    ]
    cases += [(spec, shape, best) for shape in others for spec in FEW_SPECS]
    slower = [path for path in library.paths() if path != best]
    cases += [
        (spec, shape, path) for path in slower for shape in shapes for spec in FEW_SPECS
    ]
    return cases


def measure_attend(
    spec: str, shape: StepShape, device: torch.device, runs: int, copied: float
) -> Row:
    """One codec at one shape beside the baselines of the device, medians.

    copied: GB/s of a large copy; the rest is of the row:
    gb_per_s: compressed bytes in a second, read or (alignedkv) left out; of_copy: share of `copied`
    captured: whether it ran as a CUDA graph
    ratio:    how many times faster than the fastest baseline
    error:    relative, against fp64 attention on what the pages stand for
    """
    layer = make_layer(spec, shape, device)
    error, baselines = layer.error(), make_baselines(layer)
    calls, captured, timer = [layer.layer_call(), *baselines.values()], False, time_cpu
    if device.type == "cuda":
        timer, calls[1:] = time_cuda, [_try_capture(call)[0] for call in calls[1:]]
        if layer.captured:
            calls[0], captured = _try_capture(layer.attend)
    ours, *times = timer(calls, runs)
    fastest = min(times)
    return {
        "codec": layer.codec.spec,
        "shape": shape.name,
        "heads": f"{shape.heads}x{shape.per_head}, D {shape.head_dim}",
        "backend": "cuda" if device.type == "cuda" else library.backend(),
        "microseconds": ours,
        "gb_per_s": layer.nbytes / ours / 1e3,
        "of_copy": layer.nbytes / ours / 1e3 / copied,
        "captured": captured,
        "baseline": list(baselines)[times.index(fastest)],
        "baseline_microseconds": fastest,
        "ratio": fastest / ours,
        "error": error,
    }


def measure_encode(
    specs: Sequence[str], device: torch.device, runs: int, tokens: int
) -> list[Row]:
    """Encode one layer with every codec, and copy it, by turns.

    gb_per_s: of fp16 input; copies: in that time
    """
    layer = make_prompt(tokens, ENCODE_HEADS, 128)
    q, k, v = (x.to(device) for x in (layer.q, layer.k, layer.v))
    prompt = Prompt(tokens, k, Queries.of(q, ENCODE_HEADS, tokens))
    targets = torch.empty_like(k), torch.empty_like(v)

    def copy() -> None:
        for target, x in zip(targets, (k, v), strict=True):
            target.copy_(x)

    rows = []
    for spec in tell(specs, lambda spec: f"encode, {spec}"):
        codec = get_codec(spec)
        encode = partial(codec.encode, k, v, 0, LAYER, prompt, None)
        copied, us = time_cpu(
            [partial(_finish, call, device) for call in (copy, encode)], runs
        )
        nbytes = 2 * k.numel() * k.element_size()
        speed = {
            "milliseconds": us / 1e3,
            "gb_per_s": nbytes / us / 1e3,
            "copies": us / copied,
        }
        rows.append({"codec": codec.spec, "tokens": tokens, **speed})
    return rows


def _finish(call: Call, device: torch.device) -> None:
    """Call and wait for what it started."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_baselines(layer: PagedLayer) -> dict[str, Call]:
    """Decode on fp16 K and V of the same shape, by everything at hand; on a CPU also fp32 and bf16,
    in huge pages, as the pages of codecs are."""
    shape, device = layer.shape, layer.q.device
    k, v = (
        x.half().expand(shape.batch, -1, -1, -1).contiguous()
        for x in (layer.k, layer.v)
    )
    q = layer.q[:, 0].half()
    by_group = q.unflatten(
        1, (shape.heads, -1)
    ).contiguous()  # queries of a KV head as its rows
    by_head = q.unsqueeze(2).contiguous()
    if device.type != "cuda":
        return {
            f"sdpa {name}": partial(
                sdpa,
                by_group.to(dtype),
                in_huge_pages(k.to(dtype)),
                in_huge_pages(v.to(dtype)),
            )
            for name, dtype in DTYPES.items()
            if is_runnable(name)
        }

    def flash(queries: Tensor, enable_gqa: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(queries, k, v, enable_gqa=enable_gqa)

    flex = compiled_flex(shape)
    made: dict[str, Callable[[], Call]] = {
        "sdpa flash": lambda: partial(flash, by_group, enable_gqa=False),
        "sdpa flash gqa": lambda: partial(flash, by_head, enable_gqa=True),
        "flex": lambda: partial(flex, by_head, k, v, enable_gqa=True),
    }
    found: dict[str, Call] = {}
    for name, make in made.items():
        # one refuses this shape or chip, or lacks its compiler
        with suppress(RuntimeError, ImportError, ValueError, OSError):
            call = make()
            call()
            found[name] = call
    return found


@lru_cache(maxsize=1)
def compiled_flex(shape: StepShape) -> Callable[..., Tensor]:
    """Flex attention of one shape, for all codecs: compiling takes longer than measuring."""
    torch.compiler.reset()  # or other shapes before would make this one a dynamic shape
    return torch.compile(flex_attention, dynamic=False)


@cache
def is_runnable(name: str) -> bool:
    """Whether torch attends in a dtype here; there are machines whose bf16 ends the process."""
    x = f"torch.zeros(1, 1, 64, 64, dtype={DTYPES[name]})"
    code = f"import torch; torch.nn.functional.scaled_dot_product_attention(*3 * [{x}])"
    return (
        subprocess.run([sys.executable, "-c", code], capture_output=True).returncode
        == 0
    )


def copy_speed(device: torch.device, runs: int) -> float:
    """GB that a large copy reads in a second, times two, for it writes as much."""
    timer: Timer = time_cuda if device.type == "cuda" else time_cpu
    source = torch.zeros(COLD_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / timer([lambda: target.copy_(source)], runs)[0] / 1e3


def time_cpu(calls: Sequence[Call], runs: int) -> list[float]:
    """Median microseconds of each call, by turns."""
    times: list[list[float]] = [[] for _ in calls]
    for index in range(runs + 1):
        for call, found in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            if index:
                found.append(1e6 * (time.perf_counter() - started))
    return [statistics.median(found) for found in times]


def time_cuda(calls: Sequence[Call], runs: int) -> list[float]:
    """Median microseconds of each call, by turns, each after writes that fill the L2 cache."""
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(runs):
        for call, found in zip(calls, events, strict=True):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cold.zero_()
            began.record()
            call()
            ended.record()
            found.append((began, ended))
    torch.cuda.synchronize()
    return [
        statistics.median(1e3 * a.elapsed_time(b) for a, b in found) for found in events
    ]


def _try_capture(call: Call) -> tuple[Call, bool]:
    """What replays a call as a CUDA graph, and True; the call itself where it cannot be one."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(3):  # everything compiles before the capture
            call()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return call, False
    finally:
        torch.cuda.set_stream(
            current
        )  # a capture that fails leaves its own (torch 2.13)
    return graph.replay, True
