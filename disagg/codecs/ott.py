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

UP_TO_128 = range(129), "0 to 128 is wanted"


@dataclass(frozen=True)
class Ott(QuantizedCodec):
    """Outlier token tracing: tokens of small keys leave their group and stay in 16 bits.

    Each KV head keeps the `outliers` tokens of smallest |K|_1. Among the codes the mean of their
    group stands for them, masked in attention. All tokens of a prompt that are sealed compete once;
    while decoding, each page competes with the pool. Beaten tokens stay kept, up to `aux` of them;
    a head whose slots do not suffice for the winners of a page lets none of them in.

    bits:        2, 4 or 8; by default 2.5, 4.5, 8.5 a number, without the tokens kept
    group:       16, 32, 64 or 128 - tokens that share a scale of K; channels that share one of V
    residual:    R, exact tokens always kept; the tail holds R .. R+127
    skip_layers: the first layers, which are quantised without outliers
    rank:        of a low-rank matrix for what the codes miss, as in GEAR; 0: none
    error:       none for kept tokens; else that of KIVI on the tokens and means of a group
    cost:        group=128: 2.38 bits, +32.2 %, KL 0.2845
    source:      OTT, arXiv:2505.10938; scores per KV head, one competition for a prompt, which ends
                 in the same pool as one for each group; ranks compose with GEAR, arXiv:2403.05527
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
    rank: int = one_of(0, range(17), "0 to 16 is wanted")

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
        k, v = (tokens // self.group, head_dim), (v_groups, tokens)
        factor = (tokens, self.rank)
        return [
            *code_planes(self.bits, tokens, head_dim),
            *half_planes(k_scale=k, k_zero=k, v_scale=v, v_zero=v),
            *(half_planes(k_low=factor, v_low=factor) if self.rank else []),
            ("valid", "uint8", (tokens // 8, 1)),
        ]

    def segment_planes(self, head_dim: int) -> Planes:
        shape = (head_dim, self.rank)
        return half_planes(k_basis=shape, v_basis=shape) if self.rank else []

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        planes = self.page_planes(head_dim) + self.segment_planes(head_dim)
        return (
            make_layout(self.spec, Kind.PAGE, self.page_tokens, planes)
            if self.rank
            else None
        )

    def side_layout(self, head_dim: int) -> Layout | None:
        if not self.slots:
            return None
        names = [("positions", "int32"), ("scores", "float32"), ("states", "uint8")]
        planes = [(name, dtype, (self.slots,)) for name, dtype in names]
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
    ) -> Encoded:
        won, side, kept = self._compete(k, v, first, layer, None)
        cut = Segmentation(SEGMENT_TOKENS, seed_of(layer, first))
        found = ops.encode(k, v, prompt_format(self, k.shape[2]), cut, won, target)
        return Encoded(*found, side, kept)

    def flush(
        self, k: Tensor, v: Tensor, first: int, layer: int, before: Encoded
    ) -> Encoded:
        won, side, kept = self._compete(k, v, first, layer, before)
        cut = Segmentation(SEGMENT_TOKENS, seed_of(layer, first))
        found = ops.encode(k, v, flush_format(self, k.shape[2]), cut, won)
        return Encoded(*found, side, kept, flush=True)

    def _compete(
        self, k: Tensor, v: Tensor, first: int, layer: int, before: Encoded | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The winners [H, n] bool, who leave their page; the side record and raw pages then."""
        heads, _, head_dim = k.shape
        layout = self.side_layout(head_dim)
        if layout is None:
            return None, None, None
        raw = exact_format(
            make_raw_layout(str(k.dtype).removeprefix("torch."), head_dim)
        )
        if before is not None and before.side is not None:
            side, blocks = before.side.clone(), before.kept
        else:  # a prompt begins with empty ones
            side = torch.zeros(
                heads, layout.block_bytes, dtype=torch.uint8, device=k.device
            )
            blocks = side.new_zeros(
                -(-self.outliers // RAW_TOKENS), heads, raw.block_bytes
            )
        if blocks is None or layer < self.skip_layers:
            return None, side, blocks
        kept = view_kept(side, blocks, slots_format(layout), raw)
        won = ops.keep_outliers(kept, k, v, self.outliers, first)
        return won, side, raw_blocks(kept.k, kept.v)

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        k, v = super().decode(encoded, group, dtype)
        if (
            encoded.side is not None
            and encoded.kept is not None
            and group.side is not None
        ):
            raw, fmt = exact_format(group.raw), slots_format(group.side)
            kept = view_kept(encoded.side, encoded.kept, fmt, raw)
            here = kept.positions - encoded.first
            inside = (kept.states != FREE) & (here >= 0) & (here < k.shape[1])
            head, slot = inside.nonzero(as_tuple=True)
            k[head, here[head, slot].long()] = kept.k[head, slot].to(dtype)
            v[head, here[head, slot].long()] = kept.v[head, slot].to(dtype)
        return k, v
