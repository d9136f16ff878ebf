"""OTT: KIVI with the tokens that would ruin their group kept exact (arXiv:2505.10938)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.contract import WHOLE_RAWS, Encoded, Prompt, one_of, seed_of
from disagg.codecs.exact import exact_format, raw_blocks, slots_format
from disagg.codecs.quantized import (
    Planes,
    QuantizedCodec,
    code_planes,
    flush_format,
    half_planes,
    prompt_format,
)
from disagg.kernels import ops
from disagg.kernels.formats import FREE
from disagg.kernels.reference.kept import view_kept
from disagg.kernels.sealing import Segmentation, Target
from disagg.kv.page import (
    RAW_TOKENS,
    SEGMENT_TOKENS,
    FinalAt,
    Kind,
    Layout,
    make_layout,
    make_raw_layout,
)
from disagg.kv.plan import LayerGroup

UP_TO_128 = range(129), "expected 0 to 128"


@dataclass(frozen=True)
class Ott(QuantizedCodec):
    """Outlier token tracing: tokens of small keys leave their group and stay in 16 bits.

    Each KV head keeps the `outliers` tokens of smallest |K|_1. Among the codes the mean of their
    group stands for them, masked in attention. All tokens of a prompt that are sealed compete once;
    while decoding, each page competes with the pool. Beaten tokens stay exact, up to `aux` of them;
    a head with too few slots for the winners of a page takes none of them.

    bits:        2, 4 or 8; by default 2.5, 4.5, 8.5 a number, without the tokens kept
    group:       16, 32, 64 or 128 - tokens that share a scale of K; channels that share one of V
    residual:    R, exact tokens always kept; the tail holds R .. R+127
    skip_layers: the first layers, which are quantised without outliers
    rank:        of a low-rank matrix for what the codes miss, as in GEAR; 0: none
    error:       none for kept tokens; else that of KIVI on the tokens and means of a group
    cost:        group=128: 2.38 bits, +32.2 %, KL 0.2845
    source:      OTT, arXiv:2505.10938, with these differences. The paper's group is 128, of which
                 the cost is; the default of 64 was not measured. Scores are per KV head. All tokens
                 of a prompt compete once, which ends in the same pool; but the paper lets each
                 group compete, and tokens beaten then stay exact too. A head without free slots
                 takes none of a page and may take some of the next; in the paper tracing ends.
                 Ranks compose with GEAR, arXiv:2403.05527
    """

    name: ClassVar[str] = "ott"
    no_sink: ClassVar[str] = "it finds the tokens that would ruin a group itself"
    final_at: ClassVar[FinalAt] = FinalAt.PROMPT
    page_tokens: ClassVar[int] = 128

    bits: int = one_of(2, (2, 4, 8))
    group: int = one_of(64, (16, 32, 64, 128))
    residual: int = one_of(32, *WHOLE_RAWS)
    outliers: int = one_of(3, *UP_TO_128)
    aux: int = one_of(32, *UP_TO_128)
    skip_layers: int = one_of(2, *UP_TO_128)
    rank: int = one_of(0, range(17), "expected 0 to 16")

    @property
    def tail_tokens(self) -> int:
        return self.residual

    @property
    def slots(self) -> int:
        """Tokens that a head can keep."""
        return self.outliers + self.aux

    def page_planes(self, head_dim: int) -> Planes:
        tokens = self.page_tokens
        v_groups = self.parts(head_dim) if self.group < head_dim else 1
        k = (tokens // self.group, head_dim)
        v = (v_groups, tokens)
        factor = (tokens, self.rank)
        planes = code_planes(self.bits, tokens, head_dim)
        planes += half_planes(k_scale=k, k_zero=k, v_scale=v, v_zero=v)
        if self.rank:
            planes += half_planes(k_low=factor, v_low=factor)
        return [*planes, ("valid", "uint8", (tokens // 8, 1))]

    def segment_planes(self, head_dim: int) -> Planes:
        shape = (head_dim, self.rank)
        return half_planes(k_basis=shape, v_basis=shape) if self.rank else []

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        if not self.rank:
            return None
        planes = self.page_planes(head_dim) + self.segment_planes(head_dim)
        return make_layout(self.spec, Kind.PAGE, self.page_tokens, planes)

    def side_layout(self, head_dim: int) -> Layout | None:
        if not self.slots:
            return None
        shape = (self.slots,)
        planes: Planes = [
            ("positions", "int32", shape),
            ("scores", "float32", shape),
            ("states", "uint8", shape),
        ]
        return make_layout(self.spec, Kind.SIDE, 0, planes)

    @property
    def kept_tokens(self) -> tuple[int, int]:
        return self.outliers, self.slots

    def encode(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        prompt: Prompt,
        target: Target | None,
        head: int = 0,
    ) -> Encoded:
        outliers, side, kept_pages = self._compete(k, v, first, layer, None)
        fmt = prompt_format(self, k.shape[2])
        cut = Segmentation(SEGMENT_TOKENS, seed_of(layer, first), head=head)
        blocks, segments = ops.encode(k, v, fmt, cut, outliers, target)
        return Encoded(blocks, segments, side, kept_pages)

    def flush(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        before: Encoded,
        head: int = 0,
    ) -> Encoded:
        outliers, side, kept_pages = self._compete(k, v, first, layer, before)
        fmt = flush_format(self, k.shape[2])
        cut = Segmentation(SEGMENT_TOKENS, seed_of(layer, first), head=head)
        blocks, segments = ops.encode(k, v, fmt, cut, outliers)
        return Encoded(blocks, segments, side, kept_pages, flush=True)

    def _compete(
        self, k: Tensor, v: Tensor, first: int, layer: int, before: Encoded | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Let new tokens compete for the slots of exact tokens.

        before:  the side record and raw pages so far; None: a prompt begins with empty ones
        returns: the outliers among the new tokens [H, n] bool, which leave their page; and the
                 updated side record and raw pages
        """
        heads, _, head_dim = k.shape
        layout = self.side_layout(head_dim)
        if layout is None:
            return None, None, None
        dtype = str(k.dtype).removeprefix("torch.")
        raw = exact_format(make_raw_layout(dtype, head_dim))
        blocks: Tensor | None
        if before is not None and before.side is not None:
            side, blocks = before.side.clone(), before.kept_pages
        else:
            num_pages = -(-self.outliers // RAW_TOKENS)
            side = k.new_zeros(heads, layout.block_bytes, dtype=torch.uint8)
            blocks = side.new_zeros(num_pages, heads, raw.block_bytes)
        if blocks is None or layer < self.skip_layers:
            return None, side, blocks
        slots = view_kept(side, blocks, slots_format(layout), raw)
        outliers = ops.keep_outliers(slots, k, v, self.outliers, first)
        return outliers, side, raw_blocks(slots.k, slots.v)

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        k, v = super().decode(encoded, group, dtype)
        side, kept_pages = encoded.side, encoded.kept_pages
        if side is None or kept_pages is None or group.side is None:
            return k, v
        fmt = slots_format(group.side)
        slots = view_kept(side, kept_pages, fmt, exact_format(group.raw))
        index = slots.positions - encoded.first
        is_inside = (slots.states != FREE) & (index >= 0) & (index < k.shape[1])
        head, slot = is_inside.nonzero(as_tuple=True)
        token = index[head, slot].long()
        k[head, token] = slots.k[head, slot].to(dtype)
        v[head, token] = slots.v[head, slot].to(dtype)
        return k, v
