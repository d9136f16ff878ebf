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
    "banded:bits=2",
    "0:int8:sink=64;1-:banded:bits=3,sink=0",
]


class ExactRunner(StandIn):
    """Stands for a model: K and V are a fixed function of token, position and layer."""

    def forward(self, batch: Batch) -> Tensor:
        for layer in range(self._runner.shape.num_layers):
            for chunk in batch.chunks:
                rows = slice(chunk.row, chunk.row + chunk.count)
                k, v = self.project(batch.tokens[rows], batch.positions[rows], layer)
                chunk.workspace.observe(layer, torch.cat([k, v]), chunk.before)
                all_k, all_v = chunk.workspace.extend(layer, k, v, chunk.before)
                chunk.on_layer(layer, all_k, all_v, chunk)
        return torch.zeros(len(batch.outputs), VOCAB)

    def project(self, tokens: Any, positions: Any, layer: int) -> tuple[Tensor, Tensor]:
        shape = self._runner.shape.layers[layer]
        columns = torch.arange(shape.values_per_token)
        columns = columns.view(2, shape.heads, 1, -1)
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


def digest_of(engine: Engine, prompt: list[int], codec: str, num_others: int) -> str:
    """The digest of a prompt's records, prefilled together with other prompts."""
    handoffs = {"0": Digests()}
    engine.submit(Prefill(request("0", prompt, codec, 4), handoffs["0"]))
    for i in range(1, num_others + 1):
        rid = str(i)
        handoffs[rid] = Digests()
        other = random_prompt(90 + 7 * i, i)
        engine.submit(Prefill(request(rid, other, codec, 4), handoffs[rid]))
    num_prefilled = 0
    while num_prefilled < len(handoffs):
        num_prefilled += len(engine.step().prefilled)
    digest = handoffs["0"].digest(engine, len(prompt))
    for rid in handoffs:
        engine.submit(Abort(rid))
    run_until_idle(engine)
    return digest


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_and_company_do_not_change_the_bytes_of_a_prompt(runner, codec):
    prompt = random_prompt(301, 0)
    digests = set()

    for chunk, others in ((512, 0), (1, 0), (17, 0), (64, 0), (100, 3), (512, 3)):
        engine = make_engine(ExactRunner(runner), max_batch_tokens=chunk)
        digests.add(digest_of(engine, prompt, codec, others))

    assert len(digests) == 1


# a multiple of 16 tokens: nobody writes the rest of a raw page
WHOLE_PAGES = 304


def test_a_model_gives_a_prompt_the_same_bytes_in_all_chunks(runner):
    """Not nearly the same: a last bit may lie between two codes, and change a token later on."""
    prompt = random_prompt(WHOLE_PAGES)
    digests = set()

    for chunk, others in ((512, 0), (17, 0), (64, 0), (100, 3)):
        engine = make_engine(runner, max_batch_tokens=chunk)
        digests.add(digest_of(engine, prompt, "raw", others))

    assert len(digests) == 1


def test_a_cached_prefix_does_not_change_the_bytes_of_a_prompt(runner):
    prompt = random_prompt(WHOLE_PAGES)
    engine = make_engine(runner)

    cold, resumed = (digest_of(engine, prompt, "raw", 0) for _ in range(2))

    assert engine.counts["cached_tokens"] == WHOLE_PAGES - 16
    assert resumed == cold
