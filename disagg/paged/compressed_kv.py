"""`CompressedKV`: one layer of one sequence, compressed; a codec without a service.

A plan of one layer, one sequence and a private arena that grows. It runs the code the engine runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.codecs.contract import Codec, Encoded, Queries
from disagg.codecs.registry import get_codec
from disagg.errors import RequestError
from disagg.kernels.formats import AlignedFormat, Format
from disagg.kernels.ops import attend, bits_read
from disagg.kernels.reference.aligned import Bits
from disagg.kernels.view import Softmax, View, WorkPlan
from disagg.kv.page import ARENA_UNIT
from disagg.kv.plan import LayerGroup, RecordShape
from disagg.kv.state import GroupState, allocate_group
from disagg.paged.append import RecordIds, SequenceGrowth, take_records
from disagg.paged.layer import (
    LayerRecords,
    PromptChunk,
    views_of,
    write_prompt,
    write_step,
)
from disagg.paged.page_tables import (
    appendable,
    build_tables,
    plan_step,
    plan_units,
    upload,
)


class GrowingArena:
    """An arena that doubles when it is full. Page ids are addresses, so they survive growth."""

    def __init__(self, device: torch.device):
        self.bytes = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids; never fails."""
        free_pages = self._free.setdefault(shape.nbytes, [])
        pages = []
        for _ in range(count):
            pages.append(free_pages.pop() if free_pages else self._extend(shape.nbytes))
        if shape.zeroed:
            for page in pages:
                start = page * ARENA_UNIT
                self.bytes[start : start + shape.nbytes] = 0
        self._sizes.update(dict.fromkeys(pages, shape.nbytes))
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Make pages available again."""
        for page in pages:
            self._free[self._sizes.pop(page)].append(page)

    def _extend(self, nbytes: int) -> int:
        start = self._end
        self._end += nbytes
        size = self.bytes.numel()
        if self._end > size:
            larger = self.bytes.new_zeros(max(self._end, 2 * size))
            larger[:size] = self.bytes
            self.bytes = larger
        return start // ARENA_UNIT


class CompressedKV:
    """The compressed K and V of one layer of one sequence. `compress(codec, k, v)` makes one."""

    def __init__(
        self,
        codec: Codec,
        group: LayerGroup,
        state: GroupState,
        arena: GrowingArena,
        num_tokens: int,
    ):
        self.codec = codec
        self.group = group
        self.num_tokens = num_tokens
        self._state = state
        self._arena = arena

    def append(self, k: Tensor, v: Tensor) -> None:
        """Decode m more tokens: k, v [H, m, D]. Seals pages as the codec's rule says.

        Of latents, v is their channels of k: [H, m, latent].
        """
        _check_pair(k, v, self.group.latent)
        heads, head_dim = self.group.heads, self.group.head_dim
        if k.shape[::2] != (heads, head_dim):
            raise RequestError(f"k is {[*k.shape]}; expected [{heads}, m, {head_dim}]")
        done = 0
        while done < k.shape[1]:
            m = appendable(self.group, self.num_tokens, k.shape[1] - done)
            growths = [SequenceGrowth(self._state, self.num_tokens, m, row=0)]
            records = take_records(self.group, growths, self._arena)
            step = plan_step(self.codec, self.group, growths, records, k.device)
            step = upload(step, k.device)
            new_k = k[:, done : done + m].transpose(0, 1)
            new_v = v[:, done : done + m].transpose(0, 1)
            write_step(self.codec, step, self.layer, self._arena.bytes, new_k, new_v)
            self._arena.release(step.freed)
            self.num_tokens += m
            done += m

    def attend(self, q: Tensor, softmax: Softmax | None = None) -> Tensor:
        """Attention on the compressed form.

        q:       [Hq, D], a query that sees all tokens, or [Hq, W, D], those of the last W tokens;
                 Hq a multiple of the KV heads; query head i reads KV head i // (Hq / H)
        softmax: by default a scale of D**-0.5 and nothing else
        returns: the shape of q, with the channels of V; fp32, or fp64 where q is that on a CPU
        """
        rows, views, units = self._view(q)
        softmax = softmax or Softmax(self.group.head_dim**-0.5)
        (o,) = attend(rows, views, softmax, units)
        return o.transpose(0, 1) if q.ndim == 3 else o[0]

    def bits_read(self, q: Tensor, scale: float | None = None) -> Bits:
        """Bits of K and V that each query head reads of the pages: see AlignedKV.

        RequestError where the codec always reads all that it stores, or has no page yet.
        """
        rows, views, _ = self._view(q)
        if not self._state.num_pages:
            raise RequestError(
                f"no page is sealed of {self.num_tokens} tokens; none can be read"
            )
        if not isinstance(views[0].fmt, AlignedFormat):
            raise RequestError(f"{self.codec.name} reads all that its pages store")
        if scale is None:
            scale = self.group.head_dim**-0.5
        return bits_read(rows, views[0], scale)

    def reconstruct(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(k', v') [H, n, D] of dtype: what attention sees, in token order."""
        group = self.group
        num_exact = self.num_tokens - self._state.num_pages * group.page.tokens
        exact = self._records.read_tail(self._state.tail)
        sealed = [self.codec.decode(encoded, group, dtype) for encoded in self.runs()]
        k, v = (x[:, :num_exact].to(dtype) for x in exact)
        sealed_k = [sealed_k for sealed_k, _ in sealed]
        sealed_v = [sealed_v for _, sealed_v in sealed]
        return self._join(k, sealed_k), self._join(v, sealed_v)

    def _join(self, exact: Tensor, sealed: Sequence[Tensor]) -> Tensor:
        """Sink, sealed tokens and tail, in token order; `exact` has sink and tail [H, n, ...]."""
        sink = self.group.sink
        return torch.cat([exact[:, :sink], *sealed, exact[:, sink:]], 1)

    def formats(self) -> list[Format]:
        """The formats of the pages that attention reads; sealed ones first."""
        device = self._arena.bytes.device
        q = torch.zeros(self.group.heads, self.group.head_dim, device=device)
        _, views, _ = self._view(q)
        return [view.fmt for view in views]

    def _view(self, q: Tensor) -> tuple[Tensor, list[View], WorkPlan | None]:
        """The queries as a batch of one, what they see, and their units of work."""
        heads, dim = self.group.heads, self.group.head_dim
        if q.ndim not in (2, 3) or q.shape[-1] != dim or q.shape[0] % heads:
            raise RequestError(
                f"q is {[*q.shape]}; expected [Hq, {dim}] or [Hq, W, {dim}], "
                f"Hq a multiple of {heads} KV heads"
            )
        width = q.shape[1] if q.ndim == 3 else 1
        if not 0 < width <= self.num_tokens:
            raise RequestError(
                f"{width} queries of the last of {self.num_tokens} tokens"
            )
        if q.dtype != torch.float64 or q.is_cuda:
            q = q.float()
        rows = q.reshape(q.shape[0], width, -1).transpose(0, 1)
        growth = SequenceGrowth(self._state, self.num_tokens - width, width, row=0)
        tables = build_tables(self.codec, self.group, [growth], width, q.device)
        units = plan_units(self.group, tables, q.device)
        tables, units = upload((tables, units), q.device)
        views = views_of(self.group, self.layer, self._arena.bytes, tables)
        return rows[None].contiguous(), views, units

    @property
    def layer(self) -> int:
        """Index of the layer in the model."""
        return self.group.layers[0]

    def present(self) -> Tensor:
        """[H, n] bool: the tokens that attention sees; all of them unless the codec drops some."""
        sealed = [self.codec.present(encoded, self.group) for encoded in self.runs()]
        num_exact = self.num_tokens - sum(x.shape[1] for x in sealed)
        device = self._arena.bytes.device
        exact = torch.ones(self.group.heads, num_exact, dtype=torch.bool, device=device)
        return self._join(exact, sealed)

    def runs(self) -> list[Encoded]:
        """The sealed bytes, run by run in token order."""
        group, records = self.group, self._records
        side, kept_pages = records.read_kept(RecordIds.of(self._state))
        runs = []
        for run in self._state.runs:
            segments = None
            layout = group.segment_of(run.layout)
            if layout is not None and run.segment is not None:
                segments = records.read(layout, [run.segment])
            encoded = Encoded(
                blocks=records.read(run.layout, run.pages),
                segments=segments,
                side=side,
                kept_pages=kept_pages,
                flush=run.layout == group.flush_page,
                first=run.first,
            )
            runs.append(encoded)
        return runs

    @property
    def _records(self) -> LayerRecords:
        return LayerRecords(self.group, self.layer, self._arena.bytes)

    @property
    def nbytes(self) -> int:
        """Bytes really stored: pages, segments, side record, and raw pages of the tail."""
        group, state = self.group, self._state
        num_raws = len(state.tail) + len(state.kept_pages)
        total = num_raws * group.layer_bytes(group.raw)
        for run in state.runs:
            total += len(run.pages) * group.layer_bytes(run.layout)
        segments = {run.segment: group.segment_of(run.layout) for run in state.runs}
        for layout in segments.values():
            if layout is not None:
                total += group.layer_bytes(layout)
        if group.side is not None:
            total += group.layer_bytes(group.side)
        return total


def compress(
    codec: Codec | str,
    k: Tensor,
    v: Tensor,
    layer: int = 0,
    q: Tensor | Queries | None = None,
    latent: int | None = None,
) -> CompressedKV:
    """Compress one layer of one sequence, as prefill does, without a service around it.

    codec: a codec, or its spec, such as "kivi:bits=2"
    k, v:  [H, n, D], any float dtype - keys after RoPE
    layer: index in the model; some codecs treat the first layers differently
    q:     [Hq, W, D] - the last W queries, for codecs that choose by them
    latent: first channels of k that are v too, which is not stored then: v is [H, n, latent]
    raises RequestError for shapes that do not fit together
    """
    if isinstance(codec, str):
        codec = get_codec(codec)
    _check_pair(k, v, latent)
    heads, n, head_dim = k.shape
    if isinstance(q, Tensor):
        if q.shape[0] % heads or q.shape[1] > n:
            expected = f"[a multiple of {heads}, at most {n}, {head_dim}]"
            raise RequestError(
                f"q, the last queries, is {[*q.shape]}; expected {expected}"
            )
        q = Queries.of(q, heads, n)
    dtype = str(k.dtype).removeprefix("torch.")
    group = codec.layer_group((layer,), heads, head_dim, dtype, latent=latent)
    arena = GrowingArena(k.device)
    state = allocate_group(group, n, arena)
    at = upload(RecordIds.of(state), k.device)
    chunk = PromptChunk(k, v, total=n, queries=q)
    write_prompt(codec, LayerRecords(group, layer, arena.bytes), at, chunk)
    return CompressedKV(codec, group, state, arena, num_tokens=n)


def _check_pair(k: Tensor, v: Tensor, latent: int | None) -> None:
    if k.ndim != 3 or v.shape != (*k.shape[:2], latent or k.shape[2]):
        channels = "D" if latent is None else latent
        raise RequestError(
            f"k is {[*k.shape]} and v is {[*v.shape]}; "
            f"expected [H, n, D] and [H, n, {channels}]"
        )
    if k.dtype != v.dtype or not k.is_floating_point():
        raise RequestError(
            f"k is {k.dtype} and v is {v.dtype}; expected one floating-point dtype"
        )
