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
# the figures are written between these marks
MARKS = ("<!-- figures -->", "<!-- end of figures -->")


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
            row_tokens = book[start : start + LENGTH + 1].astype(np.int64)
            row = torch.from_numpy(row_tokens)[None]
            nats += float(token_losses(model, row).sum())
            tokens += LENGTH
            chars += len(tokenizer.decode(row[0, 1:].tolist()))
    loss = nats / tokens
    return {
        "books": len(books),
        "tokens": int(tokens),
        "loss": round(loss, 4),
        "perplexity": round(math.exp(loss), 4),
        "bits_per_char": round(nats / math.log(2) / chars, 4),
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
        is_answer = torch.tensor(passage.answers[1:])
        is_judged = is_answer & (tokens[0, 1:] != model.config.eos_token_id)
        if hits[0, is_judged].all():
            right += 1
    return round(right / len(passages), 4)


def figures(
    model: LlamaForCausalLM, tokenizer: Any, books: Path, effort: int
) -> dict[str, Any]:
    """Held-out loss and task rates. effort: rows per book; tasks take 5 times as many passages."""
    model.eval()
    texts = held_out_tokens(books, tokenizer)
    rng = np.random.default_rng(SEED)
    num_passages = 5 * effort
    stories = [text for text in texts.values() if len(text) > LENGTH]
    passkeys = {}
    for distance in DISTANCES:
        draws = [stories[int(rng.integers(len(stories)))] for _ in range(num_passages)]
        prompts = [passkey_prompt(tokenizer, text, rng, distance) for text in draws]
        passkeys[str(distance)] = share_right(model, prompts)
    sums = {}
    for name, task_first in (("guided", False), ("asked", True)):
        passages = {
            str(steps): [
                arithmetic(tokenizer, rng, steps, task_first=task_first)
                for _ in range(num_passages)
            ]
            for steps in SUMS
        }
        sums[name] = {
            steps: share_right(model, chains) for steps, chains in passages.items()
        }
    held_out = held_out_figures(model, texts, tokenizer, effort)
    model.train()
    return {
        "held_out": held_out,
        "passages": num_passages,
        "passkey": passkeys,
        "arithmetic": sums,
    }


def card_table(measured: dict[str, Any]) -> str:
    """The figures as Markdown, for a model card."""
    held_out = measured["held_out"]
    passkeys = measured["passkey"]
    sums = measured["arithmetic"]
    distances = " | ".join(passkeys)
    steps = " | ".join(next(iter(sums.values())))
    lines = [
        f"After {measured['tokens']:,} tokens ({measured['step']:,} steps) of the second stage.",
        "",
        f"Held-out books ({held_out['books']} books, {held_out['tokens']:,} tokens, rows of "
        f"{LENGTH}): loss {held_out['loss']:.3f} nats per token, perplexity "
        f"{held_out['perplexity']:.1f}, {held_out['bits_per_char']:.3f} bits per character.",
        "",
        f"Share of {measured['passages']} passages with every answer token right (greedy):",
        "",
        f"| pass key, tokens between telling and asking | {distances} |",
        "|---|" + "---|" * len(passkeys),
        f"| all five digits right | {_percents(passkeys)} |",
        "",
        f"| sums in a chain | {steps} |",
        "|---|" + "---|" * len(SUMS),
    ]
    for name, shares in sums.items():
        lines.append(f"| {name} | {_percents(shares)} |")
    return "\n".join(lines)


def _percents(shares: dict[str, float]) -> str:
    return " | ".join(f"{share:.0%}" for share in shares.values())


def refresh_card(card: Path, measured: dict[str, Any]) -> None:
    """Put the figures between the marks of a model card."""
    before, rest = card.read_text(encoding="utf8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    table = f"{MARKS[0]}\n{card_table(measured)}\n{MARKS[1]}"
    card.write_text(before + table + after, encoding="utf8")
