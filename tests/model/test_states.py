"""Layers with a state: what they keep, and whether they go on from it."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.cache_utils import Cache

from disagg.errors import ModelError
from disagg.kv.page import ARENA_UNIT, make_state_layout, units_for
from disagg.model.describe import describe_model
from disagg.model.runner import Runner
from disagg.model.states.layers import split_states
from disagg.model.states.layouts import stateful_layers
from disagg.model.states.records import StateRecords
from tests.engine.forced import forced_logits
from tests.engine.serving import make_engine, serve
from tests.model.tiny import random_prompt, save_config, save_tiny, tiny_config
from tests.model.written import WrittenBytes
from tests.synthetic import relative_error


@pytest.fixture
def older_transformers(monkeypatch):
    """transformers without the cache of 5.24."""
    monkeypatch.delattr(Cache, "get_conv_state")


def test_convolutions_keep_the_dtype_of_the_model_and_recurrences_fp32(tmp_path):
    folder = save_config("qwen3_5_text", tmp_path)

    (layout, *_) = describe_model(str(folder), "bfloat16").states

    dtypes = {plane.name: plane.dtype for plane in layout.planes}
    assert dtypes == {"conv0": "bfloat16", "recurrent0": "float32"}


@pytest.mark.usefixtures("older_transformers")
def test_an_older_transformers_is_refused_by_its_version(tmp_path):
    folder = save_config("lfm2", tmp_path)

    with pytest.raises(ModelError, match=r"transformers 5\.24 or later; this is"):
        describe_model(str(folder))


@pytest.mark.parametrize(
    ("kind", "continues"),
    [("qwen3_5_text", True), ("lfm2", True), ("zaya", True), ("jamba", False)],
)
def test_scans_that_begin_anew_are_told_apart_by_what_they_compute(
    kind, continues, hybrid
):
    layers = stateful_layers(hybrid(kind)._forward.model)

    assert {modules[0].forward.continues for modules in layers} == {continues}


def test_states_that_a_config_does_not_show_are_refused(hybrid):
    with pytest.raises(ModelError, match="keeps 3 states, 0 by its config"):
        split_states(hybrid("qwen3_5_text")._forward.model, ())


def test_a_layer_that_forgets_its_state_is_refused_by_the_probe(tmp_path, monkeypatch):
    """A chunk that does not go on gives other logits than the whole prompt."""
    folder = save_tiny("jamba", tmp_path)
    monkeypatch.setattr("disagg.model.states.layers.continues_chunks", lambda *_: True)

    with pytest.raises(ModelError, match="gives other logits"):
        Runner.load(str(folder))


def test_a_hybrid_that_sees_images_is_served_by_its_language_model(tmp_path):
    text = tiny_config("qwen3_5_text").to_dict()
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision["out_hidden_size"] = text["hidden_size"]
    config = CONFIG_MAPPING["qwen3_5"](text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    prompt = random_prompt(40)
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    answer = model.generate(torch.tensor([prompt]), pad_token_id=0, **greedy)

    engine = make_engine(Runner.load(str(tmp_path)), max_batch_tokens=16)

    assert serve(engine, [prompt], "raw", 8) == [answer[0, 40:].tolist()]


# -- records


SMALL, LARGE = (2, 5, 7), (17, 31, 37)  # copied unit by unit, and left where it is


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_gathered_states_are_those_that_were_scattered(shape):
    planes = [("conv0", "bfloat16", (6, 3)), ("recurrent0", "float32", shape)]
    layout = make_state_layout(planes)
    units = units_for(layout.block_bytes)
    arena = torch.full((8 * units * ARENA_UNIT,), 0xFF, dtype=torch.uint8)
    records = StateRecords(arena, layout)
    pages = units * torch.tensor([6, 1, 3], dtype=torch.int32)
    states = {
        "conv0": torch.randn(3, 6, 3).bfloat16(),
        "recurrent0": torch.randn(3, *shape),
    }

    records.scatter(pages, states)

    gathered = records.gather(pages)
    for name, state in states.items():
        assert torch.equal(gathered[name], state)
        assert torch.equal(records.views(units)[name][0], state[1])
    written = arena.view(-1, ARENA_UNIT).ne(0xFF).any(1).nonzero().flatten()
    spans = [range(page, page + units) for page in sorted(pages.tolist())]
    assert written.tolist() == [unit for span in spans for unit in span]


def test_small_states_are_copied_once_in_and_once_out():
    """Beside them there are only the places of their units: 8 bytes, twice, for 128."""
    layout = make_state_layout([("recurrent0", "float32", (4, 32, 32))])
    units = units_for(layout.block_bytes)
    arena = torch.zeros(16 * units * ARENA_UNIT, dtype=torch.uint8)
    records = StateRecords(arena, layout)
    pages = units * torch.arange(16, dtype=torch.int32)

    with WrittenBytes() as gathering:
        states = records.gather(pages)
    with WrittenBytes() as scattering:
        records.scatter(pages, states)

    state_bytes = arena.numel()
    assert state_bytes <= gathering.nbytes < 1.2 * state_bytes
    assert state_bytes <= scattering.nbytes < 1.2 * state_bytes


# -- parts of a row


@pytest.mark.parametrize("kind", ["qwen3_5_text", "jamba"])
def test_chunks_of_any_size_give_the_logits_of_one(kind, hybrid):
    """The last chunk of 30 tokens under a budget of 29 is a single token of a prompt."""
    runner = hybrid(kind)
    prompt = {"a": random_prompt(30)}
    whole = forced_logits(runner, prompt, {"a": "raw"}, 6)

    for budget in (29, 7):
        chunks = forced_logits(runner, prompt, {"a": "raw"}, 6, max_batch_tokens=budget)
        assert relative_error(chunks["a"], whole["a"]) < 1e-4


def test_a_model_in_bf16_says_nearly_what_it_says_in_fp32(hybrid):
    runner = hybrid("qwen3_5_text")
    prompts = {"a": random_prompt(37), "b": random_prompt(5)}
    codecs = dict.fromkeys(prompts, "raw")
    exact = forced_logits(runner, prompts, codecs, 8)

    rounded_runner = Runner.load(str(runner.info.path), "bfloat16")
    rounded = forced_logits(rounded_runner, prompts, codecs, 8, max_batch_tokens=16)

    for rid, logits in exact.items():
        assert relative_error(rounded[rid], logits) < 0.1


def test_an_expert_more_or_less_in_bf16_is_no_refusal(tmp_path):
    """Experts of one token change by 0.17 of the largest logit where a scan is cut."""
    folder = str(save_tiny("granitemoehybrid", tmp_path))

    assert Runner.load(folder, "bfloat16").info.dtype == "bfloat16"


def test_rows_of_a_batch_do_not_see_the_states_of_others(hybrid):
    runner = hybrid("granitemoehybrid")
    prompts = {str(n): random_prompt(n) for n in (5, 1, 23)}
    codecs = dict.fromkeys(prompts, "raw")

    crowd = forced_logits(runner, prompts, codecs, 8, max_batch_tokens=16)

    for rid, prompt in prompts.items():
        alone = forced_logits(runner, {rid: prompt}, codecs, 8)
        assert relative_error(crowd[rid], alone[rid]) < 1e-4
