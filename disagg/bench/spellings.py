"""Is every way of reading codes right on this chip? Asked before anything is timed on it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagg.codecs.cache import GrowingArena
from disagg.codecs.kivi import Kivi
from disagg.codecs.layer import write_prompt
from disagg.codecs.seals import Growth
from disagg.codecs.tables import build_tables, upload
from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu.bits import MAGIC, PLAIN, PTX, spelling_for, takes_subnormals
from disagg.kernels.gpu.reduce import merge
from disagg.kernels.reference import codes
from disagg.state import allocate_group

CPU = torch.device("cpu")
HEAD_DIM = 128
TOKENS, HEADS = 320, 2


@dataclass(frozen=True)
class Check:
    """One spelling on one page format.

    exact_sums: whether the tensor cores take the subnormals, as bits.py asks it
    error:      of attention against the torch reference, relative
    chosen:     whether attention uses this spelling here
    """

    spelling: str
    bits: int
    exact_sums: bool
    error: float
    chosen: bool


def check_spellings(device: torch.device) -> list[Check]:
    """All spellings that can run on the device, at 2 and 4 bit."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    spellings = (PLAIN, PTX, MAGIC) if nvidia else (PLAIN, MAGIC)
    return [check_spelling(spelling, bits, device) for spelling in spellings for bits in (2, 4)]


def check_spelling(spelling: str, bits: int, device: torch.device) -> Check:
    """Attention of four heads over five pages, spelt so, against the reference."""
    codec = Kivi(bits=bits, residual=0)
    group = codec.layer_group((0,), HEADS, HEAD_DIM, "float16")
    source = torch.Generator().manual_seed(bits)
    k, v = (torch.randn(HEADS, TOKENS, HEAD_DIM, generator=source) for _ in range(2))
    q = torch.randn(1, 1, 4 * HEADS, HEAD_DIM, generator=source)
    answers: list[Tensor] = []
    for where in (CPU, device):
        arena = GrowingArena(where)
        state = allocate_group(group, TOKENS, arena)
        write_prompt(codec, group, state, 0, arena.bytes, k.to(where), v.to(where), 0, TOKENS)
        now = Growth(state, TOKENS - 1, 1, 0)
        table, *_ = build_tables(replace(group, window=TOKENS - 5), [now], 1, CPU)
        (view,) = codec.views(arena.bytes, upload((table,), where)[0], group, 0)
        if answers:
            found = gpu.attend(q.to(device), [view], 0.1, spelling=spelling)
            answers.append(merge(found)[0])
        else:
            answers.append(codes.attend(q, view, 0.1)[0])
    expected, o = answers
    return Check(
        spelling=spelling,
        bits=bits,
        exact_sums=takes_subnormals(device, spelling),
        error=float((o.cpu() - expected).norm() / expected.norm()),
        chosen=spelling_for(device) == spelling,
    )
