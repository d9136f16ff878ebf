"""Every codec goes through frames, pools and attention, and gives what one engine alone gives."""

import pytest
import torch

from disagg.codecs import codec_names
from disagg.config import EngineConfig
from disagg.llm import LLM, SamplingParams
from disagg.model.runner import Runner
from disagg.transfer.records import Checklist
from tests.engine.margins import assert_same, serve_watched
from tests.model.tiny import random_prompt, save_tiny

PLAN = "0:ott:skip_layers=0;1-:gear:bits=2,backbone=kivi"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(save_tiny("llama", tmp_path_factory.mktemp("tiny"), head_dim=64))


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, config=EngineConfig(arena_bytes=16 << 20))


@pytest.fixture(scope="module")
def runner(path: str) -> Runner:
    return Runner.load(path)


@pytest.mark.parametrize("codec", [*codec_names(), PLAN])
def test_a_hand_off_changes_no_token(llm, runner, codec):
    prompt = random_prompt(250)
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12), codec=codec)
    assert_same(answer.tokens, serve_watched(runner, prompt, codec, 12))
    kv, plan = answer.kv, llm._decode.plan(codec)
    assert kv.codec == plan.spec
    assert kv.payload_bytes + kv.cached_bytes == Checklist(plan, len(prompt)).total_bytes
    assert kv.wire_bytes > kv.payload_bytes
    assert not llm._decode.pool.referenced_pages
