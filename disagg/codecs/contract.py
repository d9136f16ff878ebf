"""The codec contract: what every compression method implements, one file per paper.

A codec is a frozen dataclass of its options; its spec string `name:option=value,...` rebuilds it.
It is stateless over one layer:

    encode    exact K and V of sealed tokens   ->  the bytes of pages (and segments, side records)
    flush     one page sealed while decoding   ->  its bytes; a codec whose pages depend on nothing
              else has a `seal_format` instead, and the append of a decode step writes the page
    format_of the layout of pages              ->  the format in which kernels read them
    decode    those bytes                      ->  the K' and V' that attention sees, for tests

The bytes of `encode` are sent, stored in the pool and read by attention. Serving never calls
`decode`.

Some models keep a latent instead of K and V: V is the first channels of K. Their pages have no
planes of V, and wherever K and V go together here, V is a view of those channels.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from disagg.codecs.exact import exact_format
from disagg.errors import ConfigError
from disagg.kernels.cpu.library import CODE_ERRORS, backend
from disagg.kernels.formats import Format, PageFormat
from disagg.kernels.ops import sum_squares
from disagg.kernels.sealing import STRETCH_TOKENS, Target
from disagg.kernels.view import Softmax
from disagg.kv.page import (
    RAW_TOKENS,
    FinalAt,
    Layout,
    make_latent_layout,
    make_raw_layout,
)
from disagg.kv.plan import LayerGroup

PAGE_TOKENS = 64  # of a page, unless a codec says otherwise
LEAD_FIRST, LEAD_END = 64, 576
LEAD_UNITS = LEAD_END // RAW_TOKENS
LATENT_CODECS = ("fp8", "int8", "kcvt", "kivi", "pertoken", "raw")  # can hold latents


@dataclass(frozen=True)
class Encoded:
    """The bytes of consecutive sealed tokens of one layer.

    blocks:   [P, H, block_bytes] u8 - pages in token order; empty where a target has them already
    segments: [S, H, segment block_bytes] u8, or None - the segments of these pages, in order
    side:     [H, side block_bytes] u8, or None - the side record after these tokens
    kept_pages: [K, H, raw block_bytes] u8, or None - raw pages of tokens that the side record names
    flush:    the pages were sealed while decoding, so they have the flush layout of their group
    first:    position of the first token, for `decode`
    """

    blocks: Tensor
    segments: Tensor | None = None
    side: Tensor | None = None
    kept_pages: Tensor | None = None
    flush: bool = False
    first: int = 0


@dataclass(frozen=True)
class Prompt:
    """One layer of the prompt to which the encoded tokens belong, after RoPE.

    total:   tokens of the whole prompt
    k:       [H, done, D] - the keys computed so far
    queries: None if they were not recorded
    """

    total: int
    k: Tensor
    queries: "Queries | None" = None


@dataclass(frozen=True)
class Queries:
    """The queries of a prompt that codecs choose by.

    last:    [Hq, W, D] - of the last W tokens, as far as they are computed
    squares: [H, D] fp64 - q^2 summed over the tokens of `lead_of` and the query heads of a KV head
    softmax: of the model; None: scores are scaled by D**-0.5
    """

    last: Tensor
    squares: Tensor
    softmax: Softmax | None = None

    @classmethod
    def of(cls, q: Tensor, heads: int, total: int) -> "Queries":
        """From q [Hq, W, D], the queries of the last W of `total` tokens."""
        squares = squares_by_unit(q, heads, before=total - q.shape[1])
        return cls(q, sum_lead(squares, total))


def lead_of(total: int) -> tuple[int, int]:
    """The tokens of a prompt whose queries and keys order the channels: [first, end).

    These are 64 .. 575. A prompt with less than a page of them uses all its tokens.
    """
    first = LEAD_FIRST if total >= LEAD_FIRST + PAGE_TOKENS else 0
    return first, min(total, LEAD_END)


def squares_by_unit(q: Tensor, heads: int, before: int) -> Tensor:
    """q^2 of a chunk of a prompt, summed over units of 16 tokens and the query heads of a KV head.

    Only tokens before LEAD_END count; see `lead_of`.

    q:       [Hq, c, D] - queries of tokens before .. before + c - 1
    returns: [LEAD_UNITS, H, D] fp64, multiples of 2**-20: chunks add up exactly in any order
    """
    before = min(before, LEAD_END)
    first, tokens_before = divmod(before, RAW_TOKENS)
    sums = sum_squares(q[:, : LEAD_END - before], heads, tokens_before)
    return pad(sums, (0, 0, 0, 0, first, LEAD_UNITS - first - len(sums)))


def sum_lead(squares: Tensor, total: int) -> Tensor:
    """The units of `lead_of(total)`, added up: [H, D]."""
    first, end = lead_of(total)
    return squares[first // RAW_TOKENS : -(-end // RAW_TOKENS)].sum(0)


def one_of(default: object, values: Sequence[object], expected: str = "") -> Any:
    """An option of a codec: a dataclass field with a default and a range of allowed values.

    expected: describes the values in a ConfigError; by default they are listed
    """
    if not expected:
        *others, last = map(str, values)
        expected = f"{', '.join(others)} and {last} are known"
    return field(default=default, metadata={"values": values, "expected": expected})


WHOLE_RAWS = range(0, 1 << 40, RAW_TOKENS), "expected a multiple of 16 tokens"


@dataclass(frozen=True)
class Codec(ABC):
    """One method with its options. A subclass's fields are its options: see `one_of`.

    final_at:      when the bytes of its pages are final
    last_queries:  how many queries of a prompt's end `encode` needs
    lead:          first tokens of a prompt that all its pages depend on
    no_sink:       why the first tokens cannot stay exact in front of the pages
    attend_errors: by CPU backend: relative error in fp32 against exact attention on the output of
                   `decode`. In fp64 it is 1e-12, except for codecs that approximate by design
    """

    name: ClassVar[str]
    final_at: ClassVar[FinalAt] = FinalAt.PAGE
    page_tokens: ClassVar[int] = PAGE_TOKENS
    last_queries: ClassVar[int] = 0
    lead: ClassVar[int] = 0
    no_sink: ClassVar[str] = ""
    attend_errors: ClassVar[Mapping[str, float]] = CODE_ERRORS

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            values = option.metadata.get("values")
            if values is not None and value not in values:
                expected = option.metadata["expected"]
                raise ConfigError(f"{self.name}:{option.name} is {value!r}; {expected}")

    @property
    def spec(self) -> str:
        """The canonical spec: every option, in declaration order; a sink last, if it is not the
        codec's default."""
        options = []
        sink = []
        for option in fields(self):
            text = f"{option.name}={getattr(self, option.name)}"
            if option.name != "sink":
                options.append(text)
            elif option.default != self.sink_tokens:
                sink.append(text)
        if not options + sink:
            return self.name
        return f"{self.name}:{','.join(options + sink)}"

    @property
    def attend_error(self) -> float:
        """The entry of `attend_errors` for the backend of this machine."""
        return self.attend_errors[backend()]

    @property
    def tail_tokens(self) -> int:
        """R: the least number of exact tokens kept in the tail."""
        return 0

    @property
    def sink_tokens(self) -> int:
        """First tokens that stay exact in front of the pages."""
        return 0

    @property
    def kept_tokens(self) -> tuple[int, int]:
        """Exact tokens that one seal sets aside in raw pages, and all seals together."""
        return 0, 0

    def raw_dtype(self, model_dtype: str) -> str:
        """The dtype of the tail: 16 bits for lossy codecs, whatever the model computes in."""
        return model_dtype if model_dtype in ("float16", "bfloat16") else "float16"

    @abstractmethod
    def page_layout(self, head_dim: int) -> Layout:
        """The planes of one page; ConfigError where the options do not divide `head_dim`."""

    def segment_layout(self, head_dim: int) -> Layout | None:
        """The planes that a stretch of 2,048 tokens shares, or None."""
        return None

    def side_layout(self, head_dim: int) -> Layout | None:
        """The planes of a sequence's mutable state, or None."""
        return None

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        """The planes of a page sealed while decoding, if they differ; such a page needs no segment.

        None: it has the `page_layout` and joins the first segment, if there are segments.
        """
        return None

    def layer_group(
        self,
        layers: tuple[int, ...],
        heads: int,
        head_dim: int,
        model_dtype: str,
        window: int | None = None,
        latent: int | None = None,
    ) -> LayerGroup:
        """The layouts of this codec for layers of `heads` KV heads.

        latent: first channels of K that are V too, which is not stored then; None: it is.
                ConfigError where the codec cannot hold such pages
        """
        kept_per_seal, kept_limit = self.kept_tokens
        page = self.page_layout(head_dim)
        flush_page = self.flush_page_layout(head_dim)
        raw = make_raw_layout(self.raw_dtype(model_dtype), head_dim)
        if latent is not None:
            self._check_latent(latent, head_dim)
            page = make_latent_layout(page, latent)
            flush_page = flush_page and make_latent_layout(flush_page, latent)
            raw = make_latent_layout(raw, latent)
        return LayerGroup(
            layers=layers,
            codec=self.spec,
            window=window,
            heads=heads,
            head_dim=head_dim,
            residual=self.tail_tokens,
            final_at=self.final_at,
            page=page,
            raw=raw,
            segment=self.segment_layout(head_dim),
            side=self.side_layout(head_dim),
            flush_page=flush_page,
            kept_per_seal=kept_per_seal,
            kept_limit=kept_limit,
            sink=self.sink_tokens if window is None else 0,
            lead=self.lead,
        )

    def _check_latent(self, latent: int, head_dim: int) -> None:
        names = ", ".join(LATENT_CODECS)
        message = f"{self.name} cannot hold latents, which have no V of their own; {names} can"
        require(self.name in LATENT_CODECS, message)
        message = (
            f"a latent has {latent} channels; expected 1 to {head_dim - 1}, since the "
            f"{head_dim} of K include a rotated key"
        )
        require(0 < latent < head_dim, message)

    @abstractmethod
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
        """The pages of tokens first .. first+n-1 of a prompt, in one layer.

        k, v:   [H, n, D] - exact values after RoPE, rounded to the tail's dtype; n a multiple of
                T. Of latents, v is their channels of k: [H, n, latent]
        first:  position of the first token; the start of a segment, or of a page
        layer:  of the model
        prompt: for codecs whose choices depend on more than these tokens
        target: where to write the blocks; None: they are returned
        head:   the model's number of the first head: a rank has some of its layer's heads
        error:  see the codec's own docstring
        """

    def early_side(self, prompt: Prompt) -> Tensor | None:
        """The side record [H, bytes] u8 of a prompt without a page, where the codec needs one."""
        return None

    def seal_format(self, group: LayerGroup) -> PageFormat | None:
        """The page that the append of a decode step seals by itself; None: it calls `flush`."""
        return None

    def flush(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        before: Encoded,
        head: int = 0,
    ) -> Encoded:
        """One page sealed while decoding that an append does not seal by itself: k, v [H, T, D].
        By default it is encoded like the only page of a prompt.

        first:  position of the first token
        before: `segments` [1, H, bytes] is the segment that the page joins, None if it begins one;
                `side` and `kept_pages` have room for what this seal may set aside
        head:   as in `encode`
        """
        return self.encode(k, v, first, layer, Prompt(k.shape[1], k), None, head)

    def format_of(self, page: Layout, segment: Layout | None, head_dim: int) -> Format:
        """The format in which kernels read pages of a layout and their segments.

        By default they are exact K and V.
        """
        return exact_format(page)

    @abstractmethod
    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """k' and v' [H, n, D] of dtype, as attention sees them; for tests and reports.

        Of latents, v' is their channels of k'.
        """

    def present(self, encoded: Encoded, group: LayerGroup) -> Tensor:
        """Tokens that attention sees: [H, n] bool. All of them, unless the codec drops tokens."""
        count, heads = encoded.blocks.shape[:2]
        shape = (heads, count * group.page.tokens)
        return torch.ones(shape, dtype=torch.bool, device=encoded.blocks.device)


def seed_of(layer: int, first: int) -> int:
    """The seed of a segment, from its layer and the position of its first token."""
    return (layer << 20) + first // STRETCH_TOKENS


def latent_of(k: Tensor, v: Tensor) -> int | None:
    """How many channels of k [H, n, D] v is, where it is a part of k; None: it is not."""
    channels = v.shape[2]
    return channels if channels < k.shape[2] else None


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)
