"""Does what serves a codec on this machine compute what the reference says?

A prompt of a few pages is encoded, decoding seals one more, then one query attends to all of it,
and then the queries of the last tokens: with the kernels that serve here, and with the torch
reference on a CPU. On a GPU this compiles what the codec needs. `disagg doctor` shows all of it; a
worker on a GPU checks its plans before it takes requests.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from disagg.codecs.contract import Codec
from disagg.codecs.exact import exact_format
from disagg.codecs.registry import get_codec
from disagg.errors import ConfigError
from disagg.kernels.cpu import library
from disagg.kernels.formats import Format
from disagg.kernels.ops import appends_by, attends_by, encodes_by
from disagg.kv.plan import LayerGroup, Plan
from disagg.paged.compressed_kv import CompressedKV, compress

LAYER = 2  # of the model: some codecs treat the first two differently
QUERIES = 32
REPLAYED = 5  # queries of one sequence at once, as when a preempted one is replayed
CPU = torch.device("cpu")
# relative errors allowed on a GPU
GPU_BYTES = 1e-2  # sums in another order tip a few roundings of codes
GPU_ATTEND = 2e-3  # q and p have 16 bits


@dataclass(frozen=True)
class Finding:
    """One kernel of one codec.

    kernel:   "encode" (a prompt), "append" (until a page is sealed), "attend" (one query) or
              "replay" (several)
    error:    relative: of the K and V that the bytes stand for, or of attention
    bound:    the largest error allowed
    first_ms: of the first call, which compiles; ms: of the next
    failure:  why there are no figures
    """

    codec: str
    kernel: str
    backend: str
    error: float = 0.0
    bound: float = 0.0
    first_ms: float = 0.0
    ms: float = 0.0
    failure: str = ""

    @property
    def sound(self) -> bool:
        """Whether it may serve; NaN may not."""
        return not self.failure and self.error <= self.bound


@dataclass(frozen=True)
class _Inputs:
    """A prompt of two pages, new tokens that seal another one, and queries: [heads, n, D]."""

    k: Tensor
    v: Tensor
    new_k: Tensor
    new_v: Tensor
    queries: Tensor
    latent: int | None


@dataclass(frozen=True)
class _Outcome:
    """Results of one pass, on the CPU, in fp64.

    encoded, appended: K and V that the bytes stand for, after the prompt and after the new tokens
    o:       attention of one query, and of several
    exact:   exact attention of the same queries over what the pages stand for
    ms:      of encode, append, and the two calls of attend
    """

    encoded: Tensor
    appended: Tensor
    o: list[Tensor]
    exact: list[Tensor]
    formats: list[Format]
    ms: list[float]


def check_plans(plans: Sequence[Plan], query_heads: int, device: torch.device) -> None:
    """ConfigError unless every kernel of every codec of these plans is sound on a device.

    Each is checked with the tails of the model, and with its number of queries for a KV head.

    query_heads: of the model
    """
    groups = [group for plan in plans for group in plan.paged]
    cases = {
        (x.codec, x.heads, x.head_dim, exact_format(x.raw).dtype, x.latent or 0)
        for x in groups
    }
    for spec, heads, head_dim, dtype, latent in sorted(cases):
        findings = examine(
            spec,
            heads,
            head_dim,
            device,
            dtype,
            per_head=query_heads // heads,
            latent=latent or None,
        )
        for finding in findings:
            if not finding.sound:
                raise ConfigError(_complaint(finding, device))


def _complaint(finding: Finding, device: torch.device) -> str:
    reason = finding.failure
    if not reason:
        reason = f"its error is {finding.error:.2g}, above {finding.bound:.2g}"
    return (
        f"{finding.kernel} of {finding.codec} by {finding.backend} is not sound on {device}: "
        f"{reason}; name another codec, or serve with model.device=cpu"
    )


def name_of(device: str) -> str:
    """The name of the hardware that "cpu" or "cuda" stands for."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return library.describe_backend()


def examine(
    spec: str,
    heads: int,
    head_dim: int,
    where: torch.device | str,
    dtype: str = "float16",
    per_head: int = 4,
    latent: int | None = None,
) -> list[Finding]:
    """Encode, append and attend of a codec on a device, against the reference.

    dtype: of K, V and the tails · per_head: query heads that share a KV head
    latent: channels of K that are V too, where pages hold latents
    """
    codec, device = get_codec(spec, head_dim), torch.device(where)
    group = codec.layer_group((LAYER,), heads, head_dim, dtype, latent=latent)
    inputs = _make_inputs(group, getattr(torch, dtype), per_head)
    with library.forced(library.TORCH):
        reference = _run(codec, inputs, CPU)
    try:
        first = _run(codec, inputs, device)
        second = _run(codec, inputs, device)
    except Exception as error:  # of a compiler, say: the codec cannot be served
        failure = f"{type(error).__name__}: {error}"
        return [Finding(codec.spec, "all", appends_by(device), failure=failure)]
    return _compare(codec, first, second, reference, device)


def _compare(
    codec: Codec,
    first: _Outcome,
    second: _Outcome,
    reference: _Outcome,
    device: torch.device,
) -> list[Finding]:
    """The findings of two passes on a device: bytes against the reference, attention against
    exact attention on the same bytes."""
    like = torch.empty(0, device=device)
    on_gpu = device.type == "cuda"
    byte_bound = GPU_BYTES if on_gpu else 0.0
    attend_bound = max(codec.attend_error, GPU_ATTEND if on_gpu else 0.0)
    encoder = encodes_by(second.formats[0], like)
    appender = appends_by(device)
    attender = attends_by(second.formats, like)
    rows = [
        ("encode", encoder, second.encoded, reference.encoded, byte_bound),
        ("append", appender, second.appended, reference.appended, byte_bound),
        ("attend", attender, second.o[0], second.exact[0], attend_bound),
        ("replay", attender, second.o[1], second.exact[1], attend_bound),
    ]
    return [
        Finding(
            codec=codec.spec,
            kernel=kernel,
            backend=backend,
            error=_error(result, expected),
            bound=bound,
            first_ms=first_ms,
            ms=ms,
        )
        for (kernel, backend, result, expected, bound), first_ms, ms in zip(
            rows, first.ms, second.ms, strict=True
        )
    ]


def _make_inputs(group: LayerGroup, dtype: torch.dtype, per_head: int) -> _Inputs:
    n = group.sink + group.residual + 2 * group.page.tokens
    more = next(m for m in count(1) if group.sealed(n + m) > group.sealed(n))
    source = torch.Generator().manual_seed(0)

    def tokens(heads: int, n: int) -> Tensor:
        x = torch.randn(heads, n, group.head_dim, generator=source)
        return x.to(dtype)

    heads = group.heads
    k, new_k = tokens(heads, n), tokens(heads, more)
    if group.latent is None:
        v, new_v = tokens(heads, n), tokens(heads, more)
    else:
        v, new_v = (x[..., : group.latent] for x in (k, new_k))
    queries = tokens(per_head * heads, QUERIES)
    return _Inputs(k, v, new_k, new_v, queries, group.latent)


def _run(codec: Codec, inputs: _Inputs, device: torch.device) -> _Outcome:
    """Encode the prompt, append the new tokens, and attend, on a device."""
    ms: list[float] = []

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ms.append(1e3 * (time.perf_counter() - start))
        return result

    k, v, queries = (x.to(device) for x in (inputs.k, inputs.v, inputs.queries))
    new_k, new_v = inputs.new_k.to(device), inputs.new_v.to(device)
    cache: CompressedKV = timed(compress, codec, k, v, LAYER, queries, inputs.latent)
    encoded = _decoded(cache)
    timed(cache.append, new_k, new_v)
    appended = _decoded(cache)
    present = cache.present().cpu()
    last = [queries[:, -width:].float() for width in (1, REPLAYED)]
    o = [timed(cache.attend, q).cpu().double() for q in last]
    exact = [_exact_attention(q.cpu().double(), appended, present) for q in last]
    return _Outcome(encoded, appended, o, exact, cache.formats(), ms)


def _decoded(cache: CompressedKV) -> Tensor:
    """K and V that attention sees, side by side: [H, n, D of both]."""
    return torch.cat(cache.reconstruct(), -1).cpu().double()


def _exact_attention(q: Tensor, kv: Tensor, present: Tensor) -> Tensor:
    """Attention of the queries of the last W tokens, q [Hq, W, D], over K and V [H, n, D of both]
    of those tokens that are present [H, n]."""
    k, v = kv.tensor_split([q.shape[2]], 2)
    width, dim = q.shape[1:]
    heads, n = present.shape
    causal = torch.ones(width, n, dtype=torch.bool).tril(n - width)
    is_visible = present[:, None, None] & causal
    grouped = q.unflatten(0, (heads, -1))
    scores = torch.einsum("hgwd,hnd->hgwn", grouped, k) * dim**-0.5
    p = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
    return torch.einsum("hgwn,hnd->hgwd", p, v).flatten(0, 1)


def _error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())
