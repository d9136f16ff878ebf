"""How fast does a GPU encode? Against a copy of the same K and V, in the same process."""

from dataclasses import dataclass
from functools import partial

import torch

from disagg.bench.kernel_speed import Call, time_cpu
from disagg.bench.kvgen import Knobs, generate
from disagg.codecs import get_codec

SPECS = ("kivi:bits=4,group=64", "kivi:bits=2,group=64", "gear-l:bits=2,backbone=kivi,group=64")
TOKENS, HEADS = 8192, 8


@dataclass(frozen=True)
class EncodeSpeed:
    """One codec: milliseconds for a layer, GB of fp16 input in a second, copies in that time."""

    codec: str
    tokens: int
    milliseconds: float
    gb_per_s: float
    copies: float


def measure_encode(device: torch.device, runs: int, tokens: int = TOKENS) -> list[EncodeSpeed]:
    """Encode one layer with every codec of SPECS, and copy it, by turns."""
    made = generate(0, Knobs(kv_heads=HEADS, group=1, n=tokens))
    k, v = made.k.to(device), made.v.to(device)
    targets = torch.empty_like(k), torch.empty_like(v)

    def copy() -> None:
        for target, x in zip(targets, (k, v), strict=True):
            target.copy_(x)

    codecs = [get_codec(spec) for spec in SPECS]
    calls: list[Call] = [partial(codec.encode, k, v, 0) for codec in codecs]
    copied, *times = time_cpu([partial(finish, call, device) for call in [copy, *calls]], runs)
    nbytes = 2 * k.numel() * k.element_size()
    return [
        EncodeSpeed(codec.spec, tokens, us / 1e3, nbytes / us / 1e3, us / copied)
        for codec, us in zip(codecs, times, strict=True)
    ]


def finish(call: Call, device: torch.device) -> None:
    """Call and wait for what it started."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
