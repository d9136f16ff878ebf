"""K and V of a prompt have the same bits in all chunks, on a CPU in float32 with packed weights."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from disagg.model import quantized_linear
from disagg.model.attention import Batch, Chunk
from disagg.model.describe import describe_model
from disagg.model.linear import PROMPT_ROWS
from disagg.model.quantized_linear import usable_weights
from disagg.model.runner import Runner
from disagg.model.weights import load_model
from tests.model.tiny import random_prompt, save_tiny

LENGTH = 60  # tokens of the prompt
# lengths of chunks: fewer tokens than a step has rows, and more
CUTS = [(1, 2, 5, 15, 16, 21), (59, 1), (45, 15)]
# as of SmolLM2: in smaller layers products of one row do not round otherwise
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
MODELS = [("llama", None), ("phi3", None), ("llama", "int8"), ("llama", "int4")]


@dataclass
class Prompt:
    """Collects the K and V of a prompt, layer by layer, and its last logits."""

    runner: Runner
    tokens: list[int]
    neighbour: list[int]
    layers: dict[int, Tensor] = field(default_factory=dict)

    def run(self, lengths):
        workspace = self.runner.workspace(len(self.tokens))
        before = 0
        for length in lengths:
            end = before + length
            chunk = Chunk(len(self.neighbour), length, before, workspace, self.note)
            logits = self.step(chunk, self.tokens[before:end])
            before = end
        return self.layers, logits

    def note(self, layer, k, v, chunk):
        self.layers[layer] = torch.stack([k, v])

    def step(self, chunk, tokens):
        chunks = [chunk]
        if self.neighbour:
            workspace = self.runner.workspace(len(self.neighbour))
            other = Chunk(0, len(self.neighbour), 0, workspace, lambda *_: None)
            chunks.append(other)
        positions = range(chunk.before, chunk.before + chunk.count)
        batch = Batch(
            tokens=[*self.neighbour, *tokens],
            positions=[*range(len(self.neighbour)), *positions],
            outputs=[chunk.row + chunk.count - 1],
            arena=torch.empty(0, dtype=torch.uint8),
            chunks=tuple(chunks),
        )
        return self.runner.forward(batch)


@pytest.fixture
def make_runner(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_linear, "LEAST_NUMBERS", {"int8": 1, "int4": 1})

    def make(kind, weights=None):
        folder = save_tiny(kind, tmp_path, **SIZES)
        if weights is not None and weights not in usable_weights("cpu", "float32"):
            pytest.skip(f"this host cannot compute {weights}")
        info = describe_model(str(folder), "float32")
        model = load_model(info, "cpu").eval().requires_grad_(False)
        return Runner(model, info, "tiny", weights=weights)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "weights"), MODELS)
def test_a_prompt_has_the_same_bits_in_all_chunks(kind, weights, make_runner):
    runner = make_runner(kind, weights)
    tokens = random_prompt(LENGTH, 1)
    layers, logits = Prompt(runner, tokens, []).run([LENGTH])

    for lengths in CUTS:
        for neighbour in ([], random_prompt(7, 2)):
            cut_layers, cut_logits = Prompt(runner, tokens, neighbour).run(lengths)
            assert torch.equal(cut_logits, logits)
            assert layers.keys() == cut_layers.keys()
            for layer, exact in layers.items():
                assert torch.equal(cut_layers[layer], exact)


def test_a_step_with_a_short_chunk_has_rows_behind_it(make_runner):
    runner = make_runner("llama")
    workspace = runner.workspace(3)
    chunk = Chunk(0, 3, 0, workspace, lambda *_: None)
    arena = torch.empty(0, dtype=torch.uint8)
    batch = Batch([5, 6, 7], [0, 1, 2], [2], arena, (chunk,))

    prepared = runner.prepare(batch)

    assert prepared.tokens[:3] == [5, 6, 7]
    for rows in (prepared.tokens, prepared.positions, prepared.long_rows):
        assert len(rows) == PROMPT_ROWS
    assert runner.prepare(prepared) == prepared
