"""The bytes of a prompt depend on its K and V alone: not on chunks, not on other prompts."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Prefill
from disagg.kv.page import ARENA_UNIT
from disagg.model.attention import Batch
from tests.engine.serving import Nowhere, StandIn, make_engine, request, run_until_idle
from tests.model.tiny import VOCAB, random_prompt

CODECS = [
    "raw",
    "kivi:bits=2,group=64,residual=64",
    "0:raw;1-:kivi:bits=4,group=32,residual=16",
]
CODECS += ["banded:bits=2", "0:int8:sink=64;1-:banded:bits=3,sink=0"]


class ExactRunner(StandIn):
    """In place of a model: K and V are a fixed function of token, position and layer."""

    def forward(self, batch: Batch) -> Tensor:
        for layer in range(self._runner.info.num_layers):
            for chunk in batch.chunks:
                rows = slice(chunk.row, chunk.row + chunk.count)
                k, v = self.project(batch.tokens[rows], batch.positions[rows], layer)
                chunk.workspace.observe(layer, torch.cat([k, v]), chunk.before)
                chunk.sink(
                    layer, *chunk.workspace.extend(layer, k, v, chunk.before), chunk
                )
        return torch.zeros(len(batch.outputs), VOCAB)

    def project(self, tokens: Any, positions: Any, layer: int) -> tuple[Tensor, Tensor]:
        shape = self._runner.shape
        columns = torch.arange(2 * shape.heads * shape.head_dim).view(
            2, shape.heads, 1, -1
        )
        phases = torch.tensor(tokens) * 31 + torch.tensor(positions) * 17 + layer
        k, v = torch.sin(phases[:, None] * 0.37 + columns * 1.7)
        return k, v


class Digests(Nowhere):
    """A hand-off that hashes every record when the prompt is complete."""

    def digest(self, engine: Engine, n: int) -> str:
        state = hashlib.blake2b()
        for group, records in zip(self.plan.groups, self.groups, strict=True):
            for kind, ids in records.ids_by_kind().items():
                assert len(ids) == group.inventory(n)[kind]
                nbytes = len(group.layers) * group.layer_bytes(group.layout(kind))
                for page in ids:
                    state.update(engine.pool.arena.read(page * ARENA_UNIT, nbytes))
        return state.hexdigest()


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_and_company_do_not_change_the_bytes_of_a_prompt(runner, codec):
    n, seen = 301, set()
    for size, others in ((512, 0), (1, 0), (17, 0), (64, 0), (100, 3), (512, 3)):
        engine = make_engine(ExactRunner(runner), max_batch_tokens=size)
        handoffs = {str(i): Digests() for i in range(others + 1)}
        for rid, handoff in handoffs.items():
            prompt = random_prompt(n if rid == "0" else 90 + 7 * int(rid), int(rid))
            engine.submit(Prefill(request(rid, prompt, codec, 4), handoff))
        done = 0
        while done < len(handoffs):
            done += len(engine.step().prefilled)
        seen.add(handoffs["0"].digest(engine, n))
        for rid in handoffs:
            engine.submit(Abort(rid))
        run_until_idle(engine)
    assert len(seen) == 1
