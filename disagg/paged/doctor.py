"""Does what serves a codec on this machine compute what the reference says?

A prompt of a few pages is encoded, decoding seals one more, and one query attends to all of it,
then those of the last tokens do: by what serves here, beside the torch reference on a CPU. On a GPU
this compiles what the codec needs. `disagg doctor` shows all of it; a worker on a GPU asks before
it takes requests.
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

LAYER = 2  # of the model: some codecs treat the first two as others
QUERIES = 32
AT_ONCE = 5  # queries of one sequence, as where it starts again
CPU = torch.device("cpu")
# relative, on a GPU: sums in another order tip a few roundings of codes; q and p have 16 bits
GPU_BYTES, GPU_ATTEND = 1e-2, 2e-3


@dataclass(frozen=True)
class Finding:
    """One kernel of one codec.

    kernel:   "encode" (a prompt), "append" (until a page is sealed), "attend" (one query) or
              "replay" (several)
    error:    relative; of K and V that the bytes stand for, or of attention; bound: of it
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
class _Outcome:
    """What came out, on the CPU, in fp64.

    o, exact: of one query and of several; exact: attention on what the pages stand for
    """

    encoded: Tensor
    appended: Tensor
    o: list[Tensor]
    exact: list[Tensor]
    formats: list[Format]
    ms: list[float]


def check_plans(plans: Sequence[Plan], query_heads: int, device: torch.device) -> None:
    """ConfigError unless every kernel of every codec of these plans is sound on a device, for a
    model of so many query heads: with its own tails, and as many queries of a KV head."""
    groups = [x for plan in plans for x in plan.groups]
    cases = {(x.codec, x.heads, x.head_dim, exact_format(x.raw).dtype) for x in groups}
    for spec, heads, head_dim, dtype in sorted(cases):
        for found in examine(
            spec, heads, head_dim, device, dtype, query_heads // heads
        ):
            if not found.sound:
                told = (
                    found.failure
                    or f"its error is {found.error:.2g}, above {found.bound:.2g}"
                )
                raise ConfigError(
                    f"{found.kernel} of {found.codec} by {found.backend} is not sound on {device}: "
                    f"{told}; name another codec, or serve with model.device=cpu"
                )


def name_of(device: str) -> str:
    """What computes on "cpu" or "cuda", in words."""
    return (
        torch.cuda.get_device_name() if device == "cuda" else library.describe_backend()
    )


def examine(
    spec: str,
    heads: int,
    head_dim: int,
    where: torch.device | str,
    dtype: str = "float16",
    per_head: int = 4,
) -> list[Finding]:
    """Encode, append and attend of a codec on a device, against the reference.

    dtype: of K, V and the tails · per_head: query heads that share a KV head
    """
    codec, device = get_codec(spec, head_dim), torch.device(where)
    group = codec.layer_group((LAYER,), heads, head_dim, dtype)
    given = _inputs(group, getattr(torch, dtype), per_head)
    with library.forced(library.TORCH):
        wanted = _run(codec, given, CPU)
    try:
        first, found = (_run(codec, given, device) for _ in range(2))
    except (
        Exception
    ) as error:  # of a compiler, say: whatever it is, the codec cannot be served
        failure = f"{type(error).__name__}: {error}"
        return [Finding(codec.spec, "all", appends_by(device), failure=failure)]
    like, on_gpu = torch.empty(0, device=device), device.type == "cuda"
    of_bytes = GPU_BYTES if on_gpu else 0.0
    of_attend = max(codec.attend_error, GPU_ATTEND if on_gpu else 0.0)
    by = attends_by(found.formats, like)
    rows = [
        (
            "encode",
            encodes_by(found.formats[0], like),
            found.encoded,
            wanted.encoded,
            of_bytes,
        ),
        ("append", appends_by(device), found.appended, wanted.appended, of_bytes),
        ("attend", by, found.o[0], found.exact[0], of_attend),
        ("replay", by, found.o[1], found.exact[1], of_attend),
    ]
    return [
        Finding(codec.spec, name, backend, _error(x, y), bound, first_ms, ms)
        for (name, backend, x, y, bound), first_ms, ms in zip(
            rows, first.ms, found.ms, strict=True
        )
    ]


def _inputs(group: LayerGroup, dtype: torch.dtype, per_head: int) -> list[Tensor]:
    """K and V of a prompt of two pages, of what then seals another one, and queries: [_, n, D]."""
    n = group.sink + group.residual + 2 * group.page.tokens
    more = next(m for m in count(1) if group.sealed(n + m) > group.sealed(n))
    source = torch.Generator().manual_seed(0)
    heads, rows = group.heads, per_head * group.heads
    sizes = [*[(heads, n)] * 2, *[(heads, more)] * 2, (rows, QUERIES)]
    return [
        torch.randn(*size, group.head_dim, generator=source).to(dtype) for size in sizes
    ]


def _run(codec: Codec, given: Sequence[Tensor], device: torch.device) -> _Outcome:
    k, v, new_k, new_v, queries = (x.to(device) for x in given)
    ms: list[float] = []

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        found = call(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ms.append(1e3 * (time.perf_counter() - began))
        return found

    cache: CompressedKV = timed(compress, codec, k, v, LAYER, queries)
    encoded = _stands_for(cache)
    timed(cache.append, new_k, new_v)
    appended, present = _stands_for(cache), cache.present().cpu()
    last = [queries[:, -count:].float() for count in (1, AT_ONCE)]
    o = [timed(cache.attend, q).cpu().double() for q in last]
    exact = [_exact(q.cpu().double(), appended, present) for q in last]
    return _Outcome(encoded, appended, o, exact, cache.formats(), ms)


def _stands_for(cache: CompressedKV) -> Tensor:
    """K and V that attention sees: [2, H, n, D]."""
    return torch.stack(cache.reconstruct()).cpu().double()


def _exact(q: Tensor, kv: Tensor, present: Tensor) -> Tensor:
    """Attention of q [Hq, W, D], of the last W tokens, over K and V [2, H, n, D] of those tokens
    that are present [H, n]."""
    (width, dim), (heads, n) = q.shape[1:], present.shape
    seen = present[:, None, None] & torch.ones(width, n, dtype=torch.bool).tril(
        n - width
    )
    scores = (
        torch.einsum("hgwd,hnd->hgwn", q.unflatten(0, (heads, -1)), kv[0]) * dim**-0.5
    )
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hgwn,hnd->hgwd", p, kv[1]).flatten(0, 1)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
