"""`disagg bench kernels`: times of attention and encoding on a CPU or a GPU.

Attention is one layer of a decode step on codes, compared with fp16 in the same process; encoding
of one layer is compared with a copy. All codecs and baselines of one shape take turns, so that a
busy machine slows all of them alike. On a GPU each call of attention is a CUDA graph that starts
with a cold L2 cache, and is checked first; on a CPU it runs the code of a service.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad
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
from disagg.bench.result import Row, progress, result_of
from disagg.codecs import get_codec
from disagg.codecs.contract import Prompt, Queries
from disagg.kernels.cpu import library
from disagg.paged.doctor import examine

SPECS = (
    "banded:bits=3",
    "banded:bits=2",
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
CUDA_SIZES = ((1, 4096), (1, 131072), (32, 8192), (64, 4096), (8, 32768))
SHAPES = {
    "cpu": (StepShape(1, 8192), StepShape(8, 2048)),
    "cuda": tuple(StepShape(*size) for size in CUDA_SIZES),
}
# on a CPU also: shapes with other heads, and the paths of the C library that serve other machines
FEW_SPECS = ("kivi:bits=4,group=64", "kivi:bits=2,group=64", "banded:bits=2", "int8")
OTHER_HEADS = ((4, 64), (1, 128), (1, 64))
# latents as of DeepSeek V2 and V3: 512 channels, behind them a rotated key of 64
LATENT_SPECS = (
    "raw:dtype=fp16",
    "int8",
    "fp8",
    "kivi:bits=4,group=64",
    "kivi:bits=2,group=64",
    "pertoken",
    "kcvt",
)
LATENT_SHAPES = tuple(
    StepShape(batch, tokens, heads=1, per_head=per_head, head_dim=576, latent=512)
    for batch, tokens, per_head in product((1, 16), (512, 4096), (16, 128))
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ENCODE_HEADS = 8
ENCODE_TOKENS = {"cpu": 2048, "cuda": 8192}
HEAD_DIM = 128
CHECKED_HEADS = 2  # of KV, where codecs are checked before a GPU is measured
COLD_BYTES = 256 << 20  # more than any L2 cache
NOTES = {
    "cpu": "a layer of a decode step on a CPU, against torch SDPA, one thread, medians by turns",
    "cuda": "CUDA graphs, cold L2, medians by turns; what torch runs is not captured",
}

Call = Callable[[], object]
Timer = Callable[[Sequence[Call], int], list[float]]


@dataclass(frozen=True)
class KernelOptions:
    """What to measure. runs: per median; shapes: empty: defaults of the device."""

    device: str = "cpu"
    runs: int = 15
    specs: Sequence[str] = SPECS
    shapes: Sequence[StepShape] = ()

    @property
    def encode_heads(self) -> StepShape:
        """A shape with the heads that encoders are measured with."""
        latents = [shape for shape in self.shapes if shape.latent is not None]
        return latents[0] if latents else StepShape(1, 0, heads=ENCODE_HEADS)


class AttentionCase(NamedTuple):
    """A codec at a shape, on a backend of the CPU."""

    spec: str
    shape: StepShape
    backend: str

    def __str__(self) -> str:
        return f"attention, {self.spec}, {self.shape.name}"


def run(options: KernelOptions) -> Row:
    """The result as a JSON object; ConfigError for a missing device."""
    check_device(options.device, "`python -m benchmarks.machine_code` needs none")
    device = torch.device(options.device)
    more: Row = {}
    if device.type == "cuda":
        checks = []
        for spec in options.specs:
            checks += examine(spec, CHECKED_HEADS, HEAD_DIM, device)
        more["checks"] = [asdict(check) for check in checks]
        more["gpu"] = torch.cuda.get_device_name(device)
    else:
        # as in a worker; and a second core is not always free
        torch.set_num_threads(1)
        more["baselines"] = {name: is_runnable(name) for name in DTYPES}
    attend = measure_cases(cases_of(options, device), device, options.runs)
    encode = measure_encode(
        options.specs,
        device,
        options.runs,
        replace(options.encode_heads, tokens=ENCODE_TOKENS[device.type]),
    )
    return result_of(attend, NOTES[device.type], **more, encode=encode)


def measure_cases(
    cases: Sequence[AttentionCase], device: torch.device, runs: int
) -> list[Row]:
    """A row for every case; cases of one shape take turns."""
    copied = copy_speed(device, runs)
    by_shape: dict[StepShape, list[AttentionCase]] = {}
    for case in cases:
        by_shape.setdefault(case.shape, []).append(case)
    numbered = progress(chain.from_iterable(by_shape.values()), str)
    rows: dict[AttentionCase, Row] = {}
    for shape, group in by_shape.items():
        layers = {}
        for case in group:
            next(numbered)
            layers[case] = make_layer(case.spec, shape, device)
        rows |= measure_attend(layers, shape, device, runs, copied)
    return [rows[case] for case in cases]


def cases_of(options: KernelOptions, device: torch.device) -> list[AttentionCase]:
    """The cases to measure: codecs, shapes and backends."""
    shapes = options.shapes or SHAPES[device.type]
    best = library.backend()
    cases = [
        AttentionCase(spec, shape, best) for shape in shapes for spec in options.specs
    ]
    if options.shapes or device.type == "cuda":
        return cases
    for shape, (per_head, head_dim) in product(shapes, OTHER_HEADS):
        other = replace(shape, per_head=per_head, head_dim=head_dim)
        cases += [AttentionCase(spec, other, best) for spec in FEW_SPECS]
    slower = [path for path in library.paths() if path != best]
    for path, shape in product(slower, shapes):
        cases += [AttentionCase(spec, shape, path) for spec in FEW_SPECS]
    return cases


def measure_attend(
    layers: Mapping[AttentionCase, PagedLayer],
    shape: StepShape,
    device: torch.device,
    runs: int,
    copied: float,
) -> dict[AttentionCase, Row]:
    """All codecs at one shape beside the baselines of the device, by turns; medians.

    copied:   GB/s of a large copy

    Of each row:

    gb_per_s: compressed bytes a second, read or (alignedkv) skipped; of_copy: share of `copied`
    captured: whether it ran as a CUDA graph
    ratio:    how many times faster than the fastest baseline
    error:    relative, against fp64 attention on the decoded pages
    """
    errors = {case: _on_backend(case, layer.error)() for case, layer in layers.items()}
    baselines = make_baselines(next(iter(layers.values())))
    calls: list[Call] = []
    captured: dict[AttentionCase, bool] = {}
    for case, layer in layers.items():
        call, captured[case] = _attend_call(case, layer)
        calls.append(call)
    if device.type == "cuda":
        calls += [_try_capture(call)[0] for call in baselines.values()]
        times = time_cuda(calls, runs)
    else:
        calls += baselines.values()
        # of this one thread: others on the machine do not count
        times = time_cpu(calls, runs, clock=time.process_time)
    baseline_times = dict(zip(baselines, times[len(layers) :], strict=True))
    baseline = min(baseline_times, key=baseline_times.__getitem__)
    rows = {}
    for (case, layer), us in zip(layers.items(), times, strict=False):
        gb_per_s = layer.nbytes / us / 1e3
        rows[case] = {
            "codec": layer.codec.spec,
            "shape": shape.name,
            "heads": f"{shape.heads}x{shape.per_head}, D {shape.head_dim}",
            "latent": shape.latent,
            "backend": "cuda" if device.type == "cuda" else case.backend,
            "microseconds": us,
            "gb_per_s": gb_per_s,
            "of_copy": gb_per_s / copied,
            "captured": captured[case],
            "baseline": baseline,
            "baseline_microseconds": baseline_times[baseline],
            "ratio": baseline_times[baseline] / us,
            "error": errors[case],
        }
    return rows


def _attend_call(case: AttentionCase, layer: PagedLayer) -> tuple[Call, bool]:
    """Attention as in a service, and whether it runs as a CUDA graph."""
    if layer.captured:
        return _try_capture(layer.attend)
    with library.forced(case.backend):
        call = layer.layer_call()
    return _on_backend(case, call), False


def _on_backend(case: AttentionCase, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call forced to the backend of a case; the call itself if that is the default."""
    if case.backend == library.backend():
        return call

    def call_on_backend() -> Any:
        with library.forced(case.backend):
            return call()

    return call_on_backend


def measure_encode(
    specs: Sequence[str], device: torch.device, runs: int, shape: StepShape
) -> list[Row]:
    """Encode one layer with every codec, and copy it, by turns.

    gb_per_s: fp16 input per second; copies: that fit into the same time
    """
    tokens = shape.tokens
    layer = make_prompt(tokens, shape.heads, shape.head_dim)
    q, k, v = layer.q.to(device), layer.k.to(device), layer.v.to(device)
    prompt = Prompt(tokens, k, Queries.of(q, shape.heads, tokens))
    k_copy, v_copy = torch.empty_like(k), torch.empty_like(v)
    nbytes = 2 * k.numel() * k.element_size()
    if shape.latent is not None:
        v, v_copy = k[..., : shape.latent], v_copy[..., :0]
        nbytes //= 2

    def copy() -> None:
        k_copy.copy_(k)
        v_copy.copy_(v[..., : v_copy.shape[-1]])

    rows = []
    for spec in progress(specs, "encode, {}".format):
        codec = get_codec(spec)
        encode = partial(codec.encode, k, v, 0, LAYER, prompt, None)
        calls = [partial(_finish, copy, device), partial(_finish, encode, device)]
        copy_us, encode_us = time_cpu(calls, runs)
        rows.append(
            {
                "codec": codec.spec,
                "tokens": tokens,
                "milliseconds": encode_us / 1e3,
                "gb_per_s": nbytes / encode_us / 1e3,
                "copies": encode_us / copy_us,
            }
        )
    return rows


def _finish(call: Call, device: torch.device) -> None:
    """Call and wait until the device has finished."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_baselines(layer: PagedLayer) -> dict[str, Call]:
    """Attention of the same shape on uncompressed K and V, by every implementation at hand.

    In fp16, on a CPU also fp32 and bf16; in huge pages, as the pages of codecs are. Latents are
    filled up with zeros to a V of as many channels as K, without which torch has no fast attention.
    """
    shape = layer.shape
    copies = (shape.batch, -1, -1, -1)
    k = layer.k.half().expand(copies).contiguous()
    filled_v = pad(layer.v, (0, layer.k.shape[2] - layer.v.shape[2]))
    v = filled_v.half().expand(copies).contiguous()
    q = layer.q[:, 0].half()
    # queries of a KV head as its rows
    by_group = q.unflatten(1, (shape.heads, -1)).contiguous()
    if not q.is_cuda:
        return _cpu_baselines(by_group, k, v)
    by_head = q.unsqueeze(2).contiguous()

    def flash(queries: Tensor, enable_gqa: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(queries, k, v, enable_gqa=enable_gqa)

    flex = compiled_flex(shape)
    candidates: dict[str, Call] = {
        "sdpa flash": lambda: flash(by_group, enable_gqa=False),
        "sdpa flash gqa": lambda: flash(by_head, enable_gqa=True),
        "flex": lambda: flex(by_head, k, v, enable_gqa=True),
    }
    calls = {}
    for name, call in candidates.items():
        # one refuses this shape or chip, or lacks its compiler
        with suppress(RuntimeError, ImportError, ValueError, OSError):
            call()
            calls[name] = call
    return calls


def _cpu_baselines(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name, dtype in DTYPES.items():
        if is_runnable(name):
            keys, values = in_huge_pages(k.to(dtype)), in_huge_pages(v.to(dtype))
            calls[f"sdpa {name}"] = partial(sdpa, q.to(dtype), keys, values)
    return calls


@lru_cache(maxsize=1)
def compiled_flex(shape: StepShape) -> Callable[..., Tensor]:
    """Flex attention of one shape, for all codecs: compiling takes longer than measuring."""
    torch.compiler.reset()  # or other shapes before would make this one a dynamic shape
    return torch.compile(flex_attention, dynamic=False)


@cache
def is_runnable(name: str) -> bool:
    """Whether torch attends in a dtype here; on some machines bf16 crashes the process."""
    x = f"torch.zeros(1, 1, 64, 64, dtype={DTYPES[name]})"
    code = f"import torch; torch.nn.functional.scaled_dot_product_attention(*3 * [{x}])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True)
    return process.returncode == 0


def copy_speed(device: torch.device, runs: int) -> float:
    """GB/s of a large copy, reads and writes added up."""
    timer: Timer = time_cuda if device.type == "cuda" else time_cpu
    source = torch.zeros(COLD_BYTES // 4, device=device)
    target = torch.empty_like(source)
    (us,) = timer([lambda: target.copy_(source)], runs)
    return 2 * source.nbytes / us / 1e3


def time_cpu(
    calls: Sequence[Call],
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median microseconds of each call, in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(runs + 1):
        for call, call_times in zip(calls, times, strict=True):
            began = clock()
            call()
            ended = clock()
            if number > 0:  # the first one warms everything
                call_times.append(1e6 * (ended - began))
    return [statistics.median(call_times) for call_times in times]


def time_cuda(calls: Sequence[Call], runs: int) -> list[float]:
    """Median microseconds of each call, in turn; writes fill the L2 cache before each."""
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(runs):
        for call, call_events in zip(calls, events, strict=True):
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            cold.zero_()
            began.record()
            call()
            ended.record()
            call_events.append((began, ended))
    torch.cuda.synchronize()
    medians = []
    for call_events in events:
        times_ms = [began.elapsed_time(ended) for began, ended in call_events]
        medians.append(1e3 * statistics.median(times_ms))
    return medians


def _try_capture(call: Call) -> tuple[Call, bool]:
    """The call as a CUDA graph and True, or the call itself and False if it cannot be captured."""
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
