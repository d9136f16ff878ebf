"""Evaluation writes the pages of a service, and its exact KV is the model itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from disagg.codecs.registry import get_codec
from disagg.eval.paged import EXACT, PagedKV, prefill
from disagg.model.attention import attend_exact
from disagg.model.runner import Runner
from disagg.paged.compressed_kv import compress
from tests.engine.serving import make_engine, serve
from tests.model.tiny import random_prompt, save_tiny
from tests.synthetic import relative_error

ROW = random_prompt(400)
PROMPT = 310  # ten tokens later a tail of 64 is full and seals


def test_exact_kv_gives_the_logits_of_the_model_itself(runner, tiny):
    kv = PagedKV(runner, EXACT, prefill(runner, ROW[:PROMPT]))

    logits = kv.feed(ROW[PROMPT:])

    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.inference_mode():
        expected = model(torch.tensor([ROW])).logits[0, PROMPT:]
    assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize(
    "codec", ["kivi:bits=2,residual=64", "gear:bits=2", "h2o", "banded"]
)
def test_greedy_tokens_are_those_of_an_engine(codec, runner):
    (expected,) = serve(make_engine(runner), [ROW[:PROMPT]], codec, 16, ignore_eos=True)
    kv = PagedKV(runner, codec, prefill(runner, ROW[:PROMPT]))

    tokens = [expected[0]]  # chosen from the exact logits of the prompt
    while len(tokens) < len(expected):
        tokens.append(int(kv.feed(tokens[-1:]).argmax()))
    assert tokens == expected


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_exact_kv_of_a_hybrid_gives_the_logits_of_the_model_itself(kind, hybrid):
    """In blocks and in single tokens, from a prompt that other codecs have fed before."""
    runner = hybrid(kind)
    row = random_prompt(100)
    prompt = prefill(runner, row[:70])
    PagedKV(runner, "kivi:bits=2", prompt).feed(row[70:])

    kv = PagedKV(runner, EXACT, prompt)
    parts = [kv.feed(row[70:90])]
    for token in row[90:]:
        parts.append(kv.feed([token]))
    logits = torch.cat(parts)

    model = AutoModelForCausalLM.from_pretrained(runner.info.path)
    with torch.inference_mode():
        expected = model(torch.tensor([row])).logits[0, 70:]
    assert relative_error(logits, expected) < 1e-4


@pytest.mark.parametrize("seals", [False, True], ids=["prompt", "streaming"])
def test_only_streaming_seals_what_is_fed(seals, runner):
    prompt = prefill(runner, ROW[:PROMPT])
    kv = PagedKV(runner, "kivi:bits=2,residual=64", prompt, seals)
    _, state = kv._groups[0]
    before = state.num_pages

    kv.feed(ROW[PROMPT:])

    assert kv.num_tokens == len(ROW)
    assert (state.num_pages > before) == seals


def test_layers_may_have_codecs_of_their_own(runner):
    prompt = prefill(runner, ROW[:PROMPT])

    mixed = PagedKV(runner, "0:raw:dtype=model;1-:kivi:bits=2", prompt)

    exact = PagedKV(runner, EXACT, prompt)
    pairs = zip(mixed.attend(prompt), exact.attend(prompt), strict=True)
    errors = [
        float((output - expected).norm() / expected.norm())
        for output, expected in pairs
    ]
    assert errors[0] == 0
    assert min(errors[1:]) > 0.01


@pytest.mark.parametrize("codec", ["kivi:bits=4", "gear:bits=2", "h2o"])
def test_attention_of_last_queries_equals_a_one_layer_cache(codec, runner):
    prompt = prefill(runner, ROW[:PROMPT])

    outputs = PagedKV(runner, codec, prompt).attend(prompt)

    for layer, kv in enumerate(prompt.layers):
        queries = kv.queries.last
        cache = compress(get_codec(codec), kv.k, kv.v, layer, queries)
        expected = cache.attend(queries[:, -1])
        last_output = outputs[layer][-1]
        assert torch.allclose(last_output, expected, atol=1e-5)


def test_sinks_that_take_most_attention_cost_no_codec_more(tmp_path):
    """Of gpt-oss: raised by 10, they take half of the output of layers with a window."""
    folder = save_tiny("gpt_oss", tmp_path, head_dim=64)
    errors = []
    for raised in (0, 10):
        raise_sinks(folder, raised)
        runner = Runner.load(str(folder))
        prompt = prefill(runner, ROW[:PROMPT])
        exact_outputs = PagedKV(runner, EXACT, prompt).attend(prompt)
        for codec in ("int8", "fp8", "kivi:bits=4", "banded"):
            outputs = PagedKV(runner, codec, prompt).attend(prompt)
            pairs = zip(outputs, exact_outputs, strict=True)
            errors.append(max(float((o - e).norm() / e.norm()) for o, e in pairs))

    for plain, with_sinks in zip(errors[:4], errors[4:], strict=True):
        assert 0 < with_sinks < 1.5 * plain


def raise_sinks(folder: Path, more: float) -> None:
    """Raise the sinks of a saved model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(".sinks"):
            tensors[name] += more
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "granite"])
def test_attention_is_as_the_model_has_it_scale_cap_and_sinks(kind, tmp_path):
    runner = Runner.load(str(save_tiny(kind, tmp_path)))
    prompt = prefill(runner, random_prompt(100))

    outputs = PagedKV(runner, EXACT, prompt).attend(prompt)

    windows = [layer.window for layer in runner.info.layers]
    for window in set(windows):
        layer = windows.index(window)
        kv = prompt.layers[layer]
        exact = attend_exact(kv.queries.last, kv.k, kv.v, kv.queries.softmax, window)
        assert torch.allclose(outputs[layer], exact.transpose(0, 1), atol=1e-5)
