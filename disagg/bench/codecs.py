"""How fast does `encode` run on one core of this machine, and what is that in copies of the input?

    python -m disagg.bench.codecs [--json]

One layer of 8 KV heads, 128 channels and 2,048 tokens of realistic K and V in fp16; the best of
several runs, in processor time, so that a busy machine does not count. A plain copy of the same
tensors is measured between them.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from disagg.bench.kvgen import Knobs, generate
from disagg.codecs import codec_names, get_codec
from disagg.codecs.describe import describe

HEADS, HEAD_DIM, TOKENS = 8, 128, 2048
RUNS = 20
MORE_SPECS = (
    "kivi:bits=2,group=64,residual=64",
    "kivi:bits=4,group=64,residual=64",
    "gear-l:bits=2,backbone=kivi,group=64",
    "gear:bits=2,backbone=kivi,group=64",
)


@dataclass(frozen=True)
class Speed:
    """One codec: GB of fp16 input encoded in a second of one core, and copies made in that time."""

    spec: str
    gb_per_s: float
    copies: float
    fp16_pct: float


def measure(spec: str, q: Tensor, k: Tensor, v: Tensor) -> Speed:
    """Encode k, v [H, n, D] fp16 as prefill does, and copy them, by turns; q are last queries."""
    codec = get_codec(spec)
    target = torch.empty_like(k), torch.empty_like(v)

    def copy() -> None:
        target[0].copy_(k)
        target[1].copy_(v)

    encode_s = copy_s = float("inf")
    for _ in range(RUNS):
        encode_s = min(encode_s, _seconds(lambda: codec.encode_prompt(k, v, 0, 2, q, k.shape[1])))
        copy_s = min(copy_s, _seconds(copy))
    nbytes = 2 * k.numel() * k.element_size()
    size = describe(spec, HEADS, HEAD_DIM, TOKENS).fp16_pct
    return Speed(codec.spec, nbytes / encode_s / 1e9, encode_s / copy_s, size)


def measure_all() -> list[Speed]:
    """Every registered codec with its defaults, and some more."""
    torch.set_num_threads(1)
    layer = generate(0, Knobs(kv_heads=HEADS, group=1, n=TOKENS, head_dim=HEAD_DIM, num_queries=32))
    return [measure(spec, layer.q, layer.k, layer.v) for spec in (*codec_names(), *MORE_SPECS)]


def _seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    speeds = measure_all()
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores_used": 1}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        rows = [asdict(speed) for speed in speeds]
        print(json.dumps({"machine": machine, "versions": versions, "encode": rows}, indent=2))
        return
    print(f"{'codec':60}{'GB/s':>8}{'copies':>9}{'fp16 %':>9}")
    for speed in speeds:
        print(f"{speed.spec:60}{speed.gb_per_s:8.3f}{speed.copies:9.1f}{speed.fp16_pct:9.2f}")


if __name__ == "__main__":
    main()
