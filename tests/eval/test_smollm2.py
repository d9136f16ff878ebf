"""On a real model: it knows something, and codecs keep the order that papers give them."""

import pytest
from transformers import AutoTokenizer

from disagg.eval.paged import EXACT, PagedKV, prefill
from disagg.eval.quality import EvalOptions, Judge
from disagg.eval.recall import greedy
from disagg.eval.summary import summarize
from disagg.kv.plan import LayerShape
from disagg.model.describe import describe_model, fetched_folder
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer

FOLDER = fetched_folder("smollm2")
HERE = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="`disagg fetch smollm2` was not run"
)
pytestmark = [pytest.mark.model, pytest.mark.timeout(600), HERE]


def test_the_folder_is_an_ordinary_model_with_its_licence():
    info = describe_model("smollm2")

    assert info.layers == (LayerShape(heads=3, head_dim=64),) * 30
    assert info.query_heads == 9
    assert (info.context_length, info.vocab_size, info.eos_ids) == (8192, 49152, (2,))
    assert "Apache-2.0" in (FOLDER / "NOTICE").read_text()
    assert "Apache License" in (FOLDER / "LICENSE").read_text()

    messages = [{"role": "user", "content": "hello"}]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chat = tokenizer.apply_chat_template(messages, tokenize=False)

    assert "<|im_start|>user\nhello<|im_end|>" in chat


def test_it_knows_the_capital_of_france():
    tokenizer, runner = Tokenizer.load("smollm2"), Runner.load("smollm2")
    tokens = tokenizer.encode("The capital of France is")

    kv = PagedKV(runner, EXACT, prefill(runner, tokens[:-1]))

    assert tokenizer.decode(greedy(kv, tokens[-1], 1)) == " Paris"


def test_codecs_keep_the_order_of_the_papers():
    specs = (
        "int8",
        "fp8",
        "kivi:bits=4",
        "gear:bits=2,backbone=kivi",
        "kivi:residual=64",
    )
    judge = Judge(EvalOptions("smollm2", specs, rows=1))
    lines = summarize([judge.measure(case) for case in judge.cases()], judge.sizes)
    losses = [line["kl"] for line in lines]

    assert losses == sorted(losses)
    assert losses[2] < 0.02 < losses[4] < 0.5
