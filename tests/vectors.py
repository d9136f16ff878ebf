"""Test vectors of docs/page-format.md: `python -m tests.vectors` writes docs/vectors/ anew.

What they mean is what `CompressedKV` says of the same K and V: `reconstruct`, and `attend` in fp64.
"""

import base64
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from disagg.codecs.contract import Queries
from disagg.codecs.planning import KVShape, codec_of, parse_plan
from disagg.kv.page import make_state_layout
from disagg.kv.plan import LayerGroup, LayerShape
from disagg.kv.state import GroupState, allocate_group
from disagg.model.states.records import StateRecords
from disagg.paged.append import RecordIds
from disagg.paged.compressed_kv import compress
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt
from disagg.transfer.records import ArenaSource, Manifest
from disagg.wire import Ticket, pack
from tests.transfer.prompts import Prompt, make_pool

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "vectors"
QUERY_HEADS = 2  # for each KV head
# of layers with a state, the planes: name, dtype and shape
DELTA = (("conv0", "bfloat16", (24, 3)), ("recurrent0", "float32", (2, 4, 5)))
CONV = (("conv0", "bfloat16", (9, 2)),)
POSITIONS = (0, 63, 64, 65, 127, 128, 191, 576, 640)


@dataclass(frozen=True)
class Vector:
    name: str
    codec: str
    tokens: int
    layers: int = 1
    heads: int = 1
    head_dim: int = 64
    dtype: str = "float16"
    latent: int | None = None
    states: tuple[tuple[tuple[str, str, tuple[int, ...]], ...], ...] = ()


VECTORS = (
    Vector("raw-bf16", "raw:dtype=bf16", 21, layers=2, heads=2, head_dim=16),
    Vector("kivi-2", "kivi:bits=2,group=64,residual=64", 213, heads=2),
    Vector(
        "kivi-4-sink", "kivi:bits=4,group=32,residual=16,sink=64", 150, dtype="bfloat16"
    ),
    Vector("banded-3-segments", "banded:bits=3", 709),
    Vector("banded-2", "banded:bits=2", 261, head_dim=128),
    Vector("banded-3-short", "banded:bits=3", 70, layers=2),
    Vector(
        "kivi-4-latent",
        "kivi:bits=4,group=32,residual=16",
        150,
        head_dim=96,
        dtype="bfloat16",
        latent=64,
    ),
    Vector(
        "kivi-4-states",
        "kivi:bits=4,group=64,residual=16",
        150,
        dtype="bfloat16",
        states=(DELTA, CONV),
    ),
)


def make_vector(vector: Vector) -> dict[str, Any]:
    heads, n, dim = vector.heads, vector.tokens, vector.head_dim
    layer_shape = LayerShape(heads, dim, latent=vector.latent)
    layouts = tuple(map(make_state_layout, vector.states))
    shape = KVShape((layer_shape,) * vector.layers, vector.dtype, layouts)
    plan = parse_plan(vector.codec, shape)
    group, *state_groups = plan.groups
    codec, pool = codec_of(group), make_pool(1 << 21, 1 << 18)
    state = allocate_group(group, n, pool)
    at = RecordIds.of(state)
    arena = torch.frombuffer(pool.arena.read(0, pool.arena.nbytes), dtype=torch.uint8)
    rng = np.random.default_rng(n)
    queries = numbers(rng, QUERY_HEADS * heads, dim)
    positions = [p for p in POSITIONS if p < n] + [n - 1]
    layers = []
    for layer in range(vector.layers):
        dtype = getattr(torch, vector.dtype)
        k, v = numbers(rng, 2, heads, n, dim).to(dtype)
        if vector.latent is not None:
            v = k[..., : vector.latent]
        q = numbers(rng, QUERY_HEADS * heads, n, dim)
        chunk = PromptChunk(k, v, total=n, queries=Queries.of(q, heads, n))
        write_prompt(codec, LayerRecords(group, layer, arena), at, chunk)
        cache = compress(codec, k, v, layer, q, vector.latent)
        new_k, new_v = cache.reconstruct()
        output = cache.attend(queries.double())
        meaning = {
            "k": array(new_k[:, positions]),
            "v": array(new_v[:, positions]),
            "output": array(output),
        }
        layers.append(meaning)
    states = [state]
    for state_group in state_groups:
        states.append(allocate_group(state_group, n, pool))
        layers.append(fill_state(state_group, states[-1], arena, rng))
    checklist = Manifest(plan, n)
    source = ArenaSource(pool.arena, checklist, states)
    prompt = Prompt(plan, (1,) * n, pool, states, checklist, source)
    ticket = Ticket(nonce=1, epoch=2, gen=1)
    frames = [*prompt.frames(ticket), prompt.commit(ticket)]
    fields = asdict(vector)
    if vector.latent is None:
        del fields["latent"]
    if not vector.states:
        del fields["states"]
    return {
        **fields,
        "codec": group.codec,
        "plan": plan.fingerprint,
        "frames": [encoded(b"".join(pack(frame))) for frame in frames],
        "queries": array(queries),
        "positions": positions,
        "meaning": layers,
    }


def fill_state(
    group: LayerGroup, state: GroupState, arena: torch.Tensor, rng: np.random.Generator
) -> dict[str, str]:
    """Write numbers into the planes of a state: what they mean, by plane."""
    records = StateRecords(arena, group.page)
    assert state.side is not None
    meaning = {}
    for name, tensor in records.views(state.side).items():
        tensor.copy_(numbers(rng, *tensor.shape))
        meaning[name] = array(tensor)
    return meaning


def numbers(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Bell-shaped numbers, with a spread for each channel; the same on every machine, since they
    are thousandths times powers of two."""
    bell = rng.integers(-1000, 1001, (3, *shape)).sum(0) / 1000
    spread = 2.0 ** (rng.permutation(shape[-1]) % 5 - 3)
    return torch.from_numpy((bell * spread).astype(np.float32))


def array(x: torch.Tensor) -> str:
    """base64 of fp32."""
    return encoded(x.float().contiguous().numpy().astype("<f4").tobytes())


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for vector in VECTORS:
        file = FOLDER / f"{vector.name}.json"
        file.write_text(json.dumps(make_vector(vector), indent=1) + "\n")


if __name__ == "__main__":
    main()
