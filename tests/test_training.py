"""Training of the default model: right answers, no held-out text, the same state after a stop."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from disagg.errors import ConfigError
from disagg.model.describe import DEFAULT_MODEL
from training import rows as rows_module
from training.figures import DISTANCES, LENGTH, MARKS, refresh_card, share_right
from training.hybrid import KINDS, hybrid_model
from training.train import TrainConfig, Training


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("books") / "books.txt"
    texts = {
        "First": "the grey cat",
        "Second": "a small dog",
        rows_module.HELD_OUT[3]: "secret Zanzibar",
    }
    write_books(file, texts)
    return file


def write_books(file: Path, texts: dict[str, str]) -> None:
    stories = (
        f"# Title: {title}\n\n" + f"{x} sat.\n\n" * 600 for title, x in texts.items()
    )
    file.write_text("\n".join(stories))


def make_rows(
    books: Path, tokenizer: Any, folder: Path, length: int = 512
) -> rows_module.RowMaker:
    return rows_module.RowMaker(
        rows_module.training_tokens(books, tokenizer, folder), tokenizer, length
    )


def answer(tokenizer: Any, passage: rows_module.Passage) -> str:
    return tokenizer.decode([t for t, a in zip(*passage, strict=True) if a])


@pytest.mark.parametrize("task_first", [False, True], ids=["guided", "asked"])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_sums_are_right_and_their_results_are_the_answers(tokenizer, steps, task_first):
    for seed in range(8):
        passage = rows_module.arithmetic(
            tokenizer, np.random.default_rng(seed), steps, task_first=task_first
        )
        text = tokenizer.decode(passage.tokens)
        number = r"(\d(?: \d)*)"
        start = re.search(f"Start with {number}", text)
        last = re.search(f"Answer: {number}", text)
        sums = re.findall(rf"{number} ([+-]) {number} = {number}\.", text)
        value = int(start[1].replace(" ", "")) if start else -1
        for first, sign, second, result in sums:
            a, b, c = (int(x.replace(" ", "")) for x in (first, second, result))
            assert a == value
            assert c == (a + b if sign == "+" else a - b) >= 0
            value = c
        assert len(sums) == steps
        assert int(last[1].replace(" ", "")) == value
        assert answer(tokenizer, passage).endswith(f" {last[1]}.{tokenizer.eos_token}")


@pytest.mark.parametrize("distance", DISTANCES)
def test_a_pass_key_is_told_that_far_before_its_answer(tokenizer, distance):
    book = np.full(3000, tokenizer.encode(" tree")[-1], dtype=np.uint16)
    passage = rows_module.passkey_prompt(
        tokenizer, book, np.random.default_rng(distance), distance
    )
    text = tokenizer.decode(passage.tokens)
    statement = re.search(
        r"pass key for the (\w+) is ([\d ]+)\. Remember it: the \1 is \2\.", text
    )
    place, key = statement.groups()

    assert answer(tokenizer, passage) == f" {key}."
    assert text.endswith(
        f"the pass key for the {place}? The pass key for the {place} is {key}."
    )
    between = text[statement.end() : text.rindex("What is")]
    assert len(tokenizer.encode(between.strip())) == pytest.approx(distance, abs=4)
    assert len(passage.tokens) <= LENGTH + 1


def test_held_out_books_never_enter_training_rows(books, tokenizer, tmp_path):
    maker = make_rows(books, tokenizer, tmp_path)

    assert "Zanzibar" in tokenizer.decode(
        rows_module.held_out_tokens(books, tokenizer)[rows_module.HELD_OUT[3]]
    )
    assert "Zanzibar" not in tokenizer.decode(maker.books)

    for step in range(15):
        tokens, weights = maker.batch(step, 2)
        assert tokens.shape == (2, 513)
        assert weights.shape == (2, 512)
        assert not any("Zanzibar" in text for text in tokenizer.batch_decode(tokens))


def test_rows_of_pass_keys_ask_only_for_keys_that_were_told(books, tokenizer, tmp_path):
    maker = make_rows(books, tokenizer, tmp_path, length=2048)
    for seed in range(10):
        text = tokenizer.decode(maker.passkeys(np.random.default_rng(seed)).tokens)
        keys = dict(re.findall(r"for the (\w+) is ([\d ]+)\. Remember", text))
        questions = re.findall(
            r"for the (\w+)\? The pass key for the \w+ is ([\d ]+)\.", text
        )

        assert questions
        assert all(keys[place] == key for place, key in questions)
        for place, key in questions:
            statement = text.index(f"the {place} is {key}. Remember")
            assert statement < text.index(f"the {place}?")


def test_books_without_a_held_out_one_are_refused(tokenizer, tmp_path):
    write_books(tmp_path / "books.txt", {"First": "the grey cat"})
    with pytest.raises(ConfigError, match="none of the held-out books"):
        rows_module.training_tokens(tmp_path / "books.txt", tokenizer, tmp_path)


def tiny_training(rows: rows_module.RowMaker) -> Training:
    torch.manual_seed(1)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 0}
    config = LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **shape, **heads)
    return Training(
        LlamaForCausalLM(config), rows, TrainConfig(steps=4, num_rows=2, length=128)
    )


def test_a_resumed_training_ends_like_an_uninterrupted_one(books, tokenizer, tmp_path):
    rows = make_rows(books, tokenizer, tmp_path, length=128)
    whole, first, second = (tiny_training(rows) for _ in range(3))

    losses = [whole.train_step(), whole.train_step()]

    assert first.train_step() == losses[0]

    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")

    assert (second.step, second.elapsed_s) == (1, first.elapsed_s)
    assert second.train_step() == losses[1]

    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_the_rate_rises_then_falls_with_the_budget(tokenizer):
    training = tiny_training(
        rows_module.RowMaker(np.zeros(200, dtype=np.uint16), tokenizer, 128)
    )
    training.config = TrainConfig(
        minutes=10, warmup_steps=10, peak_lr=1.0, end_lr_share=0.1
    )
    rates = []
    for step, minutes in [(0, 0), (10, 0), (10, 5), (10, 10), (10, 99)]:
        training.step, training.elapsed_s = step, 60.0 * minutes
        rates.append(round(training.lr(), 3))

    assert rates == [0.1, 1.0, 0.55, 0.1, 0.1]


def test_an_untrained_model_recalls_nothing(tokenizer, books, tmp_path):
    model = tiny_training(
        make_rows(books, tokenizer, tmp_path, length=128)
    ).model.eval()
    rng = np.random.default_rng(0)

    sums = [
        rows_module.arithmetic(tokenizer, rng, 2, task_first=True) for _ in range(4)
    ]

    assert share_right(model, sums) == 0


def test_a_refreshed_card_keeps_its_text_around_new_figures(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    held = {
        "books": 2,
        "tokens": 4096,
        "loss": 3.0,
        "perplexity": 20.1,
        "bits_per_char": 1.5,
    }
    sums = {"guided": {"2": 0.5, "4": 0.25, "8": 0.0}}
    measured = {
        "held_out": held,
        "passages": 50,
        "passkey": {"64": 0.5},
        "arithmetic": sums,
    }
    refresh_card(card, measured | {"tokens": 8192, "step": 2})

    text = card.read_text()

    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "After 8,192 tokens (2 steps)" in text
    assert "perplexity 20.1" in text
    assert "| guided | 50% | 25% | 0% |" in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_begins_with_what_the_default_model_knows(kind, tokenizer):
    """Worse than that model, and far better than untrained weights: 8.3 nats a token."""
    ids = tokenizer("It was the best of times, it was the worst of times.")["input_ids"]
    tokens = torch.tensor([ids])

    with torch.no_grad():
        loss = hybrid_model(kind)(tokens, labels=tokens).loss

    assert loss < 7.7
