"""The layers that the steps run: a codec, the heads of a model, and a softmax.

Kernels are compiled for formats, dtypes and numbers of query heads, not for lengths:
decode steps of an 8B model, attention by itself and the checks of equality share
theirs. So one list has all kernels to compile in advance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from disagg.bench.kernels import SPECS

KIVI, BANDED, RAW, INT8 = (
    "kivi:bits=4,group=64",
    "banded:bits=3",
    "raw:dtype=fp16",
    "int8",
)
LOW_RANK = "gear-l:bits=2,backbone=kivi,group=64"
DECODED = ("raw", KIVI, BANDED, "kivi:bits=2,group=64", INT8)  # in whole models
# a thread at most: 12 and 9 warps share a processor, where 255 make 8
REGISTERS = (168, 208)
REGISTER_SPECS = (KIVI, "kivi:bits=2,group=64", BANDED, RAW)


@dataclass(frozen=True)
class Case:
    """Sequences of one layer under a codec.

    heads:    KV heads; per_head: query heads of each
    window:   tokens that a query sees, itself included; None: all
    cap:      of scores, 0: none; sinks: whether the softmax has them
    pages:    of the first prompt, about; each further one has `spread` more
    latent:   channels of K that are V too; 0: V has its own
    block:    tokens that every sequence appends in the second step; the first appends
              one
    """

    spec: str
    heads: int = 8
    per_head: int = 4
    head_dim: int = 128
    dtype: str = "float16"
    window: int | None = None
    cap: float = 0.0
    sinks: bool = False
    latent: int = 0
    sequences: int = 2
    pages: int = 2
    spread: int = 1
    block: int = 5

    @property
    def name(self) -> str:
        """Unique among cases; omits what is default."""
        shape = f"{self.heads}x{self.per_head}-D{self.head_dim}-{self.dtype}"
        marks = [f"window{self.window}"] if self.window else []
        marks += [f"cap{self.cap:g}"] if self.cap else []
        marks += ["sinks"] if self.sinks else []
        marks += [f"latent{self.latent}"] if self.latent else []
        size = f"{self.sequences}x{self.pages}pages"
        return " ".join([self.spec, shape, *marks, size])


def served() -> list[Case]:
    """Every codec, in the layers of an 8B model."""
    return [Case(spec) for spec in dict.fromkeys([*SPECS, *DECODED])]


def shapes() -> list[Case]:
    """A few codecs in layers of other models."""
    narrow = (KIVI, BANDED, INT8, "fp8", LOW_RANK, RAW)
    wide = (KIVI, BANDED, "fp8", RAW)
    few = (KIVI, BANDED, RAW)
    return [
        *(Case(spec, 2, 4, 64) for spec in narrow),
        *(Case(spec, 2, 4, 256) for spec in wide),
        *(Case(spec, 2, per_head) for spec in few for per_head in (1, 2, 8)),
        *(Case(spec, dtype="bfloat16") for spec in few),
    ]


def softmaxes() -> list[Case]:
    """Windows, caps and sinks, and a sequence that many programs share."""
    few = (KIVI, BANDED, RAW)
    return [
        *(Case(spec, window=200, pages=6) for spec in few),
        *(Case(spec, cap=2.0) for spec in few),
        *(Case(spec, sinks=True) for spec in few),
        *(Case(spec, sequences=1, pages=256) for spec in few),
    ]


def models() -> list[Case]:
    """The packaged model and small ones of served families, in fp32, as they answer in
    tests.
    """
    tested = ("kivi:bits=4", "kivi", "kivi:bits=2", INT8, "alignedkv")
    small = Case("raw", 2, 2, 32, "float32")
    return [
        Case("raw", 2, 2, 64, "float32"),
        small,
        Case("raw", 4, 1, 16, "float32"),
        replace(small, cap=2.0),
        replace(small, sinks=True),
        Case("kivi:bits=4", 2, 2, 32, "float32"),
        *(Case(spec, 2, 2, 64, "float32") for spec in tested),
    ]


def latents() -> list[Case]:
    """Latents of DeepSeek's MLA, and of a narrower one, with as many query heads as models have."""
    specs = (RAW, INT8, "fp8", KIVI, "kivi:bits=2,group=64", "pertoken:bits=4", "kcvt")
    deepseek = Case(RAW, 1, 16, 576, "bfloat16", latent=512)
    return [
        *(replace(deepseek, spec=spec) for spec in specs),
        *(replace(deepseek, spec=spec, per_head=128) for spec in (RAW, INT8)),
        *(replace(deepseek, spec=spec, sequences=1, pages=256) for spec in (RAW, KIVI)),
        replace(deepseek, spec="kivi:bits=4,group=32", head_dim=288, latent=256),
        replace(deepseek, spec="raw", cap=2.0),
    ]


def equality() -> list[Case]:
    """The cases to compare with the reference, the most served first."""
    return [*served(), *latents(), *softmaxes(), *shapes(), *models()]


def tiny(cases: Sequence[Case]) -> list[Case]:
    """The same codecs and softmaxes in layers that an interpreter gets through."""
    few = (replace(x, sequences=2, pages=1, spread=0, block=2) for x in cases)
    small = (
        replace(x, heads=1, per_head=2, head_dim=64, latent=48 if x.latent else 0)
        for x in few
    )
    return [replace(x, dtype="float16") for x in small]
