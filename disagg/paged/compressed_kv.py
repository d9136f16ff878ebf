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
    block_size,
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
        free = self._free.setdefault(shape.nbytes, [])
        pages = [
            free.pop() if free else self._extend(shape.nbytes) for _ in range(count)
        ]
        if shape.zeroed:
            for page in pages:
                self.bytes[page * ARENA_UNIT : page * ARENA_UNIT + shape.nbytes] = 0
        self._sizes.update(dict.fromkeys(pages, shape.nbytes))
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Make pages available again."""
        for page in pages:
            self._free[self._sizes.pop(page)].append(page)

    def _extend(self, nbytes: int) -> int:
        start, self._end = self._end, self._end + nbytes
        if self._end > self.bytes.numel():
            grown = self.bytes.new_zeros(max(self._end, 2 * self.bytes.numel()))
            grown[: self.bytes.numel()] = self.bytes
            self.bytes = grown
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
        """Decode m more tokens: k, v [H, m, D]. Seals pages as the codec's rule says."""
        _check_pair(k, v)
        heads, head_dim = self.group.heads, self.group.head_dim
        if k.shape[::2] != (heads, head_dim):
            raise RequestError(f"k is {[*k.shape]}; [{heads}, m, {head_dim}] is wanted")
        done = 0
        while done < k.shape[1]:
            m = block_size(self.group, self.num_tokens, k.shape[1] - done)
            growths = [SequenceGrowth(self._state, self.num_tokens, m, 0)]
            fresh = take_records(self.group, growths, self._arena)
            step = upload(
                plan_step(self.codec, self.group, growths, fresh, k.device), k.device
            )
            rows = slice(done, done + m)
            new_k, new_v = k[:, rows].transpose(0, 1), v[:, rows].transpose(0, 1)
            write_step(self.codec, step, self.layer, self._arena.bytes, new_k, new_v)
            self._arena.release(step.freed)
            self.num_tokens += m
            done += m

    def attend(self, q: Tensor, softmax: Softmax | None = None) -> Tensor:
        """Attention on the compressed form, of shape and, where it is fp64 on a CPU, dtype of q;
        else fp32.

        q:       [Hq, D], a query that sees all tokens, or [Hq, W, D], those of the last W tokens;
                 Hq a multiple of the KV heads; query head i reads KV head i // (Hq / H)
        softmax: with a scale of D**-0.5 and nothing else unless given
        """
        rows, views, units = self._view(q)
        o = attend(rows, views, softmax or Softmax(self.group.head_dim**-0.5), units)[0]
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
        return bits_read(
            rows, views[0], self.group.head_dim**-0.5 if scale is None else scale
        )

    def reconstruct(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(k', v') [H, n, D] of dtype: what attention sees, in token order."""
        group = self.group
        tokens = self._state.num_pages * group.page.tokens
        tail = self._records.read_tail(self._state.tail)
        exact = [x[:, : self.num_tokens - tokens].to(dtype) for x in tail]
        sink, rest = (
            [x[:, : group.sink] for x in exact],
            [x[:, group.sink :] for x in exact],
        )
        sealed = [self.codec.decode(encoded, group, dtype) for encoded in self.runs()]
        k, v = (torch.cat(parts, 1) for parts in zip(sink, *sealed, rest, strict=True))
        return k, v

    def formats(self) -> list[Format]:
        """Of the pages that attention reads; sealed ones first."""
        q = torch.zeros(
            self.group.heads, self.group.head_dim, device=self._arena.bytes.device
        )
        return [view.fmt for view in self._view(q)[1]]

    def _view(self, q: Tensor) -> tuple[Tensor, list[View], WorkPlan | None]:
        """The queries as a batch of one, what they see, and their units of work."""
        heads, dim = self.group.heads, self.group.head_dim
        if q.ndim not in (2, 3) or q.shape[-1] != dim or q.shape[0] % heads:
            wanted = f"[Hq, {dim}] or [Hq, W, {dim}], Hq a multiple of {heads} KV heads, is wanted"
            raise RequestError(f"q is {[*q.shape]}; {wanted}")
        width = q.shape[1] if q.ndim == 3 else 1
        if not 0 < width <= self.num_tokens:
            raise RequestError(
                f"{width} queries of the last of {self.num_tokens} tokens"
            )
        now = SequenceGrowth(self._state, self.num_tokens - width, width, 0)
        exact = q.dtype == torch.float64 and not q.is_cuda
        rows = (
            (q if exact else q.float()).reshape(q.shape[0], width, -1).transpose(0, 1)
        )
        tables = build_tables(self.codec, self.group, [now], width, q.device)
        tables, units = upload(
            (tables, plan_units(self.group, tables, q.device)), q.device
        )
        views = views_of(self.group, self.layer, self._arena.bytes, tables)
        return rows[None].contiguous(), views, units

    @property
    def layer(self) -> int:
        """The model layer that this is."""
        return self.group.layers[0]

    def present(self) -> Tensor:
        """[H, n] bool: the tokens that attention sees; all of them unless the codec drops some."""
        sealed = [self.codec.present(encoded, self.group) for encoded in self.runs()]
        tail = self.num_tokens - sum(x.shape[1] for x in sealed)
        rest = torch.ones(
            self.group.heads, tail, dtype=torch.bool, device=self._arena.bytes.device
        )
        sink = self.group.sink
        return torch.cat([rest[:, :sink], *sealed, rest[:, sink:]], 1)

    def runs(self) -> list[Encoded]:
        """The sealed bytes, run by run in token order."""
        group, records, found = self.group, self._records, []
        kept = records.read_kept(RecordIds.of(self._state))
        for run in self._state.runs:
            blocks, segments = records.read(run.layout, run.pages), None
            layout = group.segment_of(run.layout)
            if layout is not None and run.segment is not None:
                segments = records.read(layout, [run.segment])
            flushed = run.layout == group.flush_page
            found.append(Encoded(blocks, segments, *kept, flushed, run.first))
        return found

    @property
    def _records(self) -> LayerRecords:
        return LayerRecords(self.group, self.layer, self._arena.bytes)

    @property
    def nbytes(self) -> int:
        """Bytes really stored: pages, segments, side record, and raw pages of the tail."""
        group, state = self.group, self._state
        total = (len(state.tail) + len(state.kept_pages)) * group.layer_bytes(group.raw)
        total += sum(
            len(run.pages) * group.layer_bytes(run.layout) for run in state.runs
        )
        segments = {run.segment: group.segment_of(run.layout) for run in state.runs}
        total += sum(
            group.layer_bytes(layout) for layout in segments.values() if layout
        )
        if group.side is not None:
            total += group.layer_bytes(group.side)
        return total


def compress(
    codec: Codec | str,
    k: Tensor,
    v: Tensor,
    layer: int = 0,
    q: Tensor | Queries | None = None,
) -> CompressedKV:
    """Compress one layer of one sequence, as prefill does, without a service around it.

    codec: or its spec, such as "kivi:bits=2"
    k, v:  [H, n, D], any float dtype - keys after RoPE
    layer: index in the model; some codecs treat the first layers differently
    q:     [Hq, W, D] - the last W queries, for codecs that choose by them
    raises RequestError for shapes that do not fit together
    """
    if isinstance(codec, str):
        codec = get_codec(codec)
    _check_pair(k, v)
    heads, n, head_dim = k.shape
    if isinstance(q, Tensor):
        if q.shape[0] % heads or q.shape[1] > n:
            expected = f"[a multiple of {heads}, at most {n}, {head_dim}]"
            raise RequestError(
                f"q, the last queries, is {[*q.shape]}; expected {expected}"
            )
        q = Queries.of(q, heads, n)
    dtype = str(k.dtype).removeprefix("torch.")
    group = codec.layer_group((layer,), heads, head_dim, dtype)
    arena = GrowingArena(k.device)
    state = allocate_group(group, n, arena)
    at = upload(RecordIds.of(state), k.device)
    chunk = PromptChunk(k, v, total=n, queries=q)
    write_prompt(codec, LayerRecords(group, layer, arena.bytes), at, chunk)
    return CompressedKV(codec, group, state, arena, num_tokens=n)


def _check_pair(k: Tensor, v: Tensor) -> None:
    if k.ndim != 3 or k.shape != v.shape:
        raise RequestError(
            f"k is {[*k.shape]} and v is {[*v.shape]}; both [H, n, D] are wanted"
        )
    if k.dtype != v.dtype or not k.is_floating_point():
        raise RequestError(
            f"k is {k.dtype} and v is {v.dtype}; one floating-point dtype is wanted"
        )
