"""banded: channels of K in bands of 4, 2 and 0 bits, values rotated and at 2 bits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.contract import LEAD_END, Encoded, Prompt, lead_of, one_of, require
from disagg.codecs.quantized import SINKS, Planes, SinkCodec, prompt_format
from disagg.kernels import ops
from disagg.kernels.formats import (
    HADAMARD_SIZE,
    HadamardRotation,
    PageFormat,
    Scale,
    Side,
)
from disagg.kernels.reference.lowrank import seeded_uniform
from disagg.kernels.reference.pages import pack_bits
from disagg.kernels.reference.quantize import finite
from disagg.kernels.sealing import HEAD_STRIDE, Segmentation, Target
from disagg.kv.page import FinalAt, Kind, Layout, make_layout

# by `bits`: widths of the bands, the most important first, and the channels of D / 4 in each
BANDS: Mapping[int, tuple[tuple[int, int], ...]] = {
    2: ((4, 1), (2, 2), (0, 1)),
    3: ((4, 2), (2, 2)),
}


@dataclass(frozen=True)
class Banded(SinkCodec):
    """K in bands of channels with different numbers of bits, V rotated by a Hadamard matrix.

    Each KV head has its channels of K in an order: those that matter most to scores have 4 bits,
    others 2, and with bits=2 the last quarter only its mean in each page. The order is by mean q^2
    over the query heads of the KV head, times the mean squared range of k in a page, both after
    RoPE and over tokens 64 .. 575 of the prompt, or as many as it has; where the first page is
    sealed while decoding, over that page. It lies in each segment, and attention permutes the query
    by it. V is rotated with random signs, fixed for each layer and KV head, and attention rotates
    the output back.

    bits:     2 (a quarter of K's channels at 4 bits, half at 2, a quarter at 0) or 3 (half at 4,
              half at 2); V has 2 bits, in groups of 64 channels. 2.49 and 3.02 bits a number with
              scales, zeros and order
    sink:     64, or 0 - first tokens that stay exact
    error:    of codes of b bits |x' - x| <= 2**(b+1) s per group, and 2**-10 max|x|, where s is its
              scale; the mean of a group is kept, and <x' - m, x - m> = <x - m, x - m> about it
    cost:     bits=3: 3.02 bits, +1.1 %, KL 0.0112; bits=2: 2.49 bits, +1.4 %, KL 0.0218
    source:   bands of channels: Kitty, arXiv:2511.18643, which chooses an eighth or a quarter of
              them for each page; channels reordered: SKVQ, arXiv:2405.06219; Hadamard rotations
              against outliers: QuaRot, arXiv:2404.00456; groups: KIVI, arXiv:2402.02750. Fixed
              bands, attended directly, the order from the prompt itself and the fit are our own
    """

    name: ClassVar[str] = "banded"
    final_at: ClassVar[FinalAt] = FinalAt.SEGMENT
    segment_tokens: ClassVar[int] = 512
    lead: ClassVar[int] = LEAD_END

    bits: int = one_of(3, (*BANDS,))
    sink: int = one_of(64, SINKS)

    @property
    def tail_tokens(self) -> int:
        return 64

    def bands(self, head_dim: int) -> list[tuple[int, int]]:
        """Bits and channels of each band of K."""
        is_power_of_two = head_dim & (head_dim - 1) == 0
        message = (
            f"a power of two from 64 on splits into the bands of banded; "
            f"the head dim is {head_dim}"
        )
        require(head_dim >= 64 and is_power_of_two, message)
        bands = BANDS[self.bits]
        return [(width, quarters * head_dim // 4) for width, quarters in bands]

    def page_planes(self, head_dim: int) -> Planes:
        tokens = self.page_tokens
        planes: Planes = []
        coded = 0  # channels that have codes
        for width, channels in self.bands(head_dim):
            if width:
                shape = (tokens // 4, channels * width // 4)
                planes.append((f"k_codes{width}", "int16", shape))
                coded += channels
        groups = (head_dim // HADAMARD_SIZE, tokens)
        return [
            *planes,
            ("v_codes", "int16", (head_dim // 4, tokens // 2)),
            ("k_scale", "float16", (1, head_dim)),
            ("k_zero", "float16", (1, coded)),
            ("v_scale", "float16", groups),
            ("v_zero", "float16", groups),
        ]

    def segment_planes(self, head_dim: int) -> Planes:
        return [
            ("order", "int16", (1, head_dim)),
            ("signs", "uint8", (1, head_dim // 8)),
        ]

    def side_layout(self, head_dim: int) -> Layout | None:
        planes = [("squares", "float32", (1, head_dim))]
        return make_layout(self.spec, Kind.SIDE, 0, planes)

    def format_of(
        self, page: Layout, segment: Layout | None, head_dim: int
    ) -> PageFormat:
        assert segment is not None
        offset = {plane.name: plane.offset for plane in (*page.planes, *segment.planes)}
        tokens = page.tokens
        bands = []
        first = 0  # channel of a band, in the order of channels
        for width, channels in self.bands(head_dim):
            scale = Scale(
                "column",
                tokens,
                offset["k_scale"] + 2 * first,
                zero=offset["k_zero"] + 2 * first if width else None,
                fitted=width > 0,
            )
            codes = offset[f"k_codes{width}"] if width else 0
            bands.append(Side(tokens, channels, width, codes, scale))
            first += channels
        v_scale = Scale(
            "column", HADAMARD_SIZE, offset["v_scale"], offset["v_zero"], fitted=True
        )
        return PageFormat(
            tokens=tokens,
            head_dim=head_dim,
            block_bytes=page.block_bytes,
            segment_bytes=segment.block_bytes,
            k=bands[0],
            v=Side(head_dim, tokens, 2, offset["v_codes"], v_scale),
            bands=tuple(bands[1:]),
            hadamard=HadamardRotation(offset["order"], offset["signs"]),
        )

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
        segment = self._segment(_squares(prompt), _ranges(prompt), layer, head)
        cut = Segmentation(self.segment_tokens, frozen=segment)
        fmt = prompt_format(self, k.shape[2])
        blocks, segments = ops.encode(k, v, fmt, cut, target=target)
        return Encoded(blocks, segments)

    def early_side(self, prompt: Prompt) -> Tensor:
        return _squares(prompt).float().view(torch.uint8)

    def flush(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        before: Encoded,
        head: int = 0,
    ) -> Encoded:
        if before.segments is None:
            # the first page of all: the end of the prompt left its squares in the side record
            assert before.side is not None
            squares = before.side.view(torch.float32).double()
            ranges = _ranges(Prompt(k.shape[1], k))
            segment = self._segment(squares, ranges, layer, head)
            before = replace(before, segments=segment.unsqueeze(0))
        return super().flush(k, v, first, layer, before, head)

    def _segment(
        self, squares: Tensor, ranges: Tensor, layer: int, head: int
    ) -> Tensor:
        """The record [H, bytes] u8 of every segment, from sums of q^2 and ranges of k [H, D]."""
        heads, head_dim = ranges.shape
        weights = torch.where(squares.sum(1, keepdim=True) > 0, squares, 1.0) * ranges
        order = weights.argsort(dim=1, descending=True, stable=True)
        signs = _signs(layer, range(head, head + heads), head_dim, order.device)
        fmt = prompt_format(self, head_dim)
        assert fmt.hadamard is not None
        record = signs.new_zeros(heads, fmt.segment_bytes)
        order_bytes = order.short().view(torch.uint8)
        for offset, plane in (
            (fmt.hadamard.order, order_bytes),
            (fmt.hadamard.signs, signs),
        ):
            record[:, offset : offset + plane.shape[1]] = plane
        return record


def _squares(prompt: Prompt) -> Tensor:
    """Sums of q^2 [H, D] fp64; 0 where no queries were recorded."""
    if prompt.queries is None:
        return prompt.k.new_zeros(prompt.k.shape[::2], dtype=torch.float64)
    return prompt.queries.squares


def _ranges(prompt: Prompt) -> Tensor:
    """Mean squared range of k over whole pages of the tokens that order channels: [H, D] fp64."""
    first, end = lead_of(prompt.total)
    end -= (end - first) % 64
    pages = finite(prompt.k[:, first:end]).unflatten(1, (-1, 64))
    return (pages.amax(2) - pages.amin(2)).double().square().mean(1)


@lru_cache(maxsize=1024)
def _signs(layer: int, heads: range, head_dim: int, device: torch.device) -> Tensor:
    """Random bits for V's channels, packed low bit first: [H, D / 8] u8; 1 stands for -1.

    heads: by their numbers in the model
    """
    seeds = layer * HEAD_STRIDE + torch.arange(heads.start, heads.stop, device=device)
    return pack_bits(seeded_uniform(seeds, head_dim) < 0.5)
