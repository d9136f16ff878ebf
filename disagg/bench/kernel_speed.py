"""How long does a decode step of one layer take on codes, and on fp16 in the same process?

Everything is measured by turns, so that a busy machine is busy for all. On a GPU each call is a
CUDA graph that begins with a cold L2 cache; on a CPU the code runs that runs in service.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from disagg.bench.paged_layers import PagedLayer, Shape, make_layer

SPECS = (
    "kivi:bits=4,group=64",
    "kivi:bits=2,group=64",
    "gear-l:bits=4,backbone=kivi,group=64",
    "gear-l:bits=2,backbone=kivi,group=64",
    "gear:bits=2,backbone=kivi,group=64",
    "int8",
    "fp8",
    "kcvt",
    "pertoken",
    "decoquant",
    "ott",
    "h2o",
    "alignedkv",
    "raw:dtype=fp16",
)
CPU_SHAPES = (Shape(1, 4096), Shape(8, 2048))
CUDA_SHAPES = (
    Shape(1, 4096),
    Shape(1, 131072),
    Shape(32, 8192),
    Shape(64, 4096),
    Shape(8, 32768),
)
COLD_BYTES = 256 << 20  # more than any L2 cache

Call = Callable[[], object]
Timer = Callable[[Sequence[Call], int], list[float]]


@dataclass(frozen=True)
class Speed:
    """One codec at one shape, medians.

    gb_per_s: compressed bytes in a second, read or (alignedkv) left out; of_copy: share of a
              measured copy's
    captured: whether it ran as a CUDA graph
    ratio:    how many times faster than the fastest baseline
    error:    relative, against fp64 attention on what the pages stand for
    """

    codec: str
    shape: str
    microseconds: float
    gb_per_s: float
    of_copy: float
    captured: bool
    baseline: str
    baseline_microseconds: float
    ratio: float
    error: float


def measure_shape(
    shape: Shape, specs: Sequence[str], device: torch.device, runs: int
) -> list[Speed]:
    """Every codec at one shape, with the baselines of the device."""
    timer = time_cuda if device.type == "cuda" else time_cpu
    copied = copy_speed(timer, device, runs)
    found = []
    for spec in specs:
        layer = make_layer(spec, shape, device)
        error = relative_error(layer)
        baselines = make_baselines(layer)
        attend: Call = layer.attend
        captured = device.type == "cuda" and layer.captured
        if captured:
            attend, captured = _try_capture(attend)
        calls: list[Call] = [attend]
        for baseline in baselines.values():
            calls.append(_try_capture(baseline)[0] if device.type == "cuda" else baseline)
        ours, *others = timer(calls, runs)
        fastest = min(others)
        found.append(
            Speed(
                codec=layer.codec.spec,
                shape=shape.name,
                microseconds=ours,
                gb_per_s=layer.nbytes / ours / 1e3,
                of_copy=layer.nbytes / ours / 1e3 / copied,
                captured=captured,
                baseline=list(baselines)[others.index(fastest)],
                baseline_microseconds=fastest,
                ratio=fastest / ours,
                error=error,
            )
        )
    return found


def relative_error(layer: PagedLayer) -> float:
    """Of `attend`, before it is timed."""
    exact = layer.exact()
    return float((layer.attend().double() - exact).norm() / exact.norm())


def make_baselines(layer: PagedLayer) -> dict[str, Call]:
    """Decode on fp16 (CPU: also fp32) K and V of the same shape, by everything at hand."""
    shape, device = layer.shape, layer.q.device
    repeats = shape.tokens // layer.k.shape[1]
    k, v = (
        x.half().repeat(1, repeats, 1).expand(shape.batch, -1, -1, -1).contiguous()
        for x in (layer.k, layer.v)
    )
    q = layer.q[:, 0].half()
    by_group = q.unflatten(1, (shape.heads, -1)).contiguous()  # queries of a KV head as its rows
    by_head = q.unsqueeze(2).contiguous()
    if device.type != "cuda":
        wide = by_group.float(), k.float(), v.float()
        narrow = by_group.bfloat16(), k.bfloat16(), v.bfloat16()
        return {
            "sdpa fp32": lambda: scaled_dot_product_attention(wide[0], wide[1], wide[2]),
            "sdpa bf16": lambda: scaled_dot_product_attention(narrow[0], narrow[1], narrow[2]),
        }

    def flash_rows() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(by_group, k, v)

    def flash_gqa() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(by_head, k, v, enable_gqa=True)

    torch.compiler.reset()  # or other shapes before would make this one a dynamic shape
    flex = torch.compile(flex_attention, dynamic=False)
    made: dict[str, Callable[[], Call]] = {
        "sdpa flash": lambda: flash_rows,
        "sdpa flash gqa": lambda: flash_gqa,
        "flex": lambda: lambda: flex(by_head, k, v, enable_gqa=True),
    }
    if find_spec("flashinfer"):
        made["flashinfer"] = lambda: _flashinfer(shape, q, k, v)
    found = {name: _make_running(make) for name, make in made.items()}
    return {name: call for name, call in found.items() if call is not None}


def _make_running(make: Callable[[], Call]) -> Call | None:
    """A baseline, or None if it refuses this shape or chip, or lacks its compiler."""
    try:
        call = make()
        call()
    except (RuntimeError, ImportError, ValueError, OSError):
        return None
    return call


def _flashinfer(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Its paged decode over pages of 16 tokens."""
    flashinfer = import_module("flashinfer")
    count = shape.tokens // 16
    pages = [x.transpose(1, 2).unflatten(1, (count, 16)).flatten(0, 1) for x in (k, v)]
    cache = torch.stack(pages, 1).contiguous()  # [pages, 2, 16, H, D]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * count
    ids = torch.arange(shape.batch * count, dtype=torch.int32, device=q.device)
    last = torch.full((shape.batch,), 16, dtype=torch.int32, device=q.device)
    rows = shape.heads * shape.per_head
    wrapper.plan(starts, ids, last, rows, shape.heads, shape.head_dim, 16, q_data_type=q.dtype)
    return lambda: wrapper.run(q, cache)


def copy_speed(timer: Timer, device: torch.device, runs: int) -> float:
    """GB that a large copy reads in a second, times two, for it writes as much."""
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
    return [statistics.median(1e3 * a.elapsed_time(b) for a, b in found) for found in events]


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
        torch.cuda.set_stream(current)  # a capture that fails leaves its own (torch 2.13)
    return graph.replay, True
