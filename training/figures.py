"""Figures of a model: loss on held-out books, recall of pass keys, right sums.

This file knows how to judge a model and how a card shows the outcome; it does not train.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from training.rows import (
    SEED,
    Passage,
    Tokens,
    arithmetic,
    held_out_tokens,
    passkey_prompt,
)

LENGTH = 2048
DISTANCES = (64, 256, 512, 1024, 1536, 1900)
SUMS = (2, 4, 8)
MARKS = (
    "<!-- figures -->",
    "<!-- end of figures -->",
)  # what stands between is written here


def token_losses(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """tokens: [B, N + 1] i64; returns: [B, N] f32 - nats of each next token."""
    logits = next_logits(model, tokens)
    losses = cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return losses.view(tokens.shape[0], -1)


def next_logits(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """tokens: [B, N + 1] i64; returns: [B, N, V] f32 - the logits of each next token."""
    logits: Tensor = model(tokens[:, :-1], use_cache=False).logits
    return logits.float()


@torch.no_grad()
def held_out_figures(
    model: LlamaForCausalLM, books: dict[str, Tokens], tokenizer: Any, num_rows: int
) -> dict[str, Any]:
    """Loss over `num_rows` evenly spaced rows of each held-out book."""
    nats = tokens = chars = 0.0
    for book in books.values():
        for start in np.linspace(0, len(book) - LENGTH - 1, num_rows).astype(int):
            row = torch.from_numpy(book[start : start + LENGTH + 1].astype(np.int64))[
                None
            ]
            nats += float(token_losses(model, row).sum())
            tokens += LENGTH
            chars += len(tokenizer.decode(row[0, 1:].tolist()))
    figures = {"loss": nats / tokens, "perplexity": math.exp(nats / tokens)}
    figures["bits_per_char"] = nats / math.log(2) / chars
    return {"books": len(books), "tokens": int(tokens)} | {
        k: round(x, 4) for k, x in figures.items()
    }


@torch.no_grad()
def share_right(model: LlamaForCausalLM, passages: list[Passage]) -> float:
    """The share of passages whose every answer token is the model's first choice.

    While all earlier choices were right, greedy decoding sees the same text as this one pass does.
    The end-of-text token after an answer is not judged.
    """
    right = 0
    for passage in passages:
        tokens = torch.tensor([passage.tokens])
        hits = next_logits(model, tokens).argmax(-1) == tokens[:, 1:]
        judged = torch.tensor(passage.answers[1:]) & (
            tokens[0, 1:] != model.config.eos_token_id
        )
        right += bool(hits[0, judged].all())
    return round(right / len(passages), 4)


def figures(
    model: LlamaForCausalLM, tokenizer: Any, books: Path, effort: int
) -> dict[str, Any]:
    """Held-out loss and task rates. effort: rows per book; tasks take 5 times as many passages."""
    model.eval()
    texts, rng = held_out_tokens(books, tokenizer), np.random.default_rng(SEED)
    stories = [text for text in texts.values() if len(text) > LENGTH]
    passkeys, sums = {}, {}
    for d in DISTANCES:
        draws = [stories[int(rng.integers(len(stories)))] for _ in range(5 * effort)]
        prompts = [passkey_prompt(tokenizer, text, rng, d) for text in draws]
        passkeys[str(d)] = share_right(model, prompts)
    for asked in (False, True):
        rates = {
            str(n): [
                arithmetic(tokenizer, rng, n, asked=asked) for _ in range(5 * effort)
            ]
            for n in SUMS
        }
        sums["asked" if asked else "guided"] = {
            n: share_right(model, p) for n, p in rates.items()
        }
    held_out = held_out_figures(model, texts, tokenizer, effort)
    model.train()
    return {
        "held_out": held_out,
        "passages": 5 * effort,
        "passkey": passkeys,
        "arithmetic": sums,
    }


def card_table(measured: dict[str, Any]) -> str:
    """The figures as Markdown, for a model card."""
    steps = f"{measured['step']:,} steps"
    held, keys, sums = measured["held_out"], measured["passkey"], measured["arithmetic"]
    return "\n".join(
        [
            f"After {measured['tokens']:,} tokens ({steps}) of the second stage.",
            "",
            f"Held-out books ({held['books']} books, {held['tokens']:,} tokens, rows of {LENGTH}): "
            f"loss {held['loss']:.3f} nats per token, perplexity {held['perplexity']:.1f}, "
            f"{held['bits_per_char']:.3f} bits per character.",
            "",
            f"Share of {measured['passages']} passages with every answer token right (greedy):",
            "",
            "| pass key, tokens between telling and asking | "
            + " | ".join(keys)
            + " |",
            "|---|" + "---|" * len(keys),
            "| all five digits right | "
            + " | ".join(f"{x:.0%}" for x in keys.values())
            + " |",
            "",
            "| sums in a chain | " + " | ".join(next(iter(sums.values()))) + " |",
            "|---|" + "---|" * len(SUMS),
            *[
                f"| {k} | " + " | ".join(f"{x:.0%}" for x in v.values()) + " |"
                for k, v in sums.items()
            ],
        ]
    )


def refresh_card(card: Path, measured: dict[str, Any]) -> None:
    """Put the figures between the marks of a model card."""
    before, rest = card.read_text(encoding="utf8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    table = f"{MARKS[0]}\n{card_table(measured)}\n{MARKS[1]}"
    card.write_text(before + table + after, encoding="utf8")
