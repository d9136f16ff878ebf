"""From logits to tokens, and to log-probabilities: one pass over a whole batch, on its device.

Randomness is a function of (seed, token index) and of nothing else. So a token does not depend on
the batch it was sampled in, on the worker, or on how often its sequence was started: no sampler
state travels.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from disagg.engine.messages import named
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import Logprobs, Request, SamplingParams, Sequence
from disagg.errors import RequestError

LARGEST = 256, 4096  # shares of a row that are looked at before all are


@dataclass(frozen=True)
class Sampled:
    """A token, and its log-probabilities where they are wanted."""

    token: int
    logprobs: Logprobs | None = None


def sample(
    logits: Tensor,
    requests: Seq[Request],
    emitted: Seq[Seq[int]],
    eos_ids: Seq[int] = (),
) -> list[Sampled]:
    """One token for each row.

    logits:  [B, V] fp32
    emitted: per row, the tokens of the answer so far
    eos_ids: end a text, so that none comes before `min_tokens`
    RequestError where the logits of a row are infinite or no numbers
    """
    params = [request.params for request in requests]
    scores = _edit(logits, requests, emitted, eos_ids)
    best, tokens = scores.max(dim=-1)  # on a CPU argmax takes twice as long
    tokens = tokens.where(best.isfinite(), scores.shape[-1])
    if drawn := [row for row, choice in enumerate(params) if choice.temperature]:
        indices = [len(emitted[row]) for row in drawn]
        tokens[drawn] = _draw(scores[drawn], [params[row] for row in drawn], indices)
    chosen = tokens.tolist()
    if max(chosen, default=0) >= logits.shape[-1]:
        raise RequestError(
            "no token can be drawn: its logits, as it wants them, are no numbers"
        )
    asked = {row: x.logprobs for row, x in enumerate(params) if x.logprobs is not None}
    rows = list(asked)
    found = (
        logprobs_of(logits[rows], tokens[rows], list(asked.values())) if rows else []
    )
    known = dict(zip(rows, found, strict=True))
    return [Sampled(token, known.get(row)) for row, token in enumerate(chosen)]


def logprobs_of(logits: Tensor, tokens: Tensor, counts: Seq[int]) -> list[Logprobs]:
    """What the model says of tokens, whatever sampling makes of it.

    logits: [B, V] · tokens: [B] · counts: per row, how many of the likeliest are wanted
    """
    shares = logits.float().log_softmax(dim=-1)
    own = shares.gather(-1, tokens[:, None])[:, 0].tolist()
    best, ids = (
        x.tolist() for x in shares.topk(min(max(counts, default=0), shares.shape[-1]))
    )
    return [
        (own[row], tuple(zip(ids[row][:count], best[row][:count], strict=True)))
        for row, count in enumerate(counts)
    ]


def score_prompts(shares: Seq[ScheduledTokens], logits: Tensor) -> Tensor:
    """Keep what logits [rows, V] say of prompts; those that give the next tokens."""
    if not any(share.scores for share in shares):
        return logits
    last = []
    for share, part in zip(
        shares, logits.split([x.outputs for x in shares]), strict=True
    ):
        sequence = share.sequence
        if share.scores:
            del sequence.scores[sequence.n :]  # of a start that was given up
            known = sequence.request.tokens[sequence.n + 1 :][: share.count]
            counts = [sequence.request.params.logprobs or 0] * len(known)
            tokens = torch.tensor(known, dtype=torch.int64, device=logits.device)
            sequence.scores += logprobs_of(part[: len(known)], tokens, counts)
        if share.completes:
            last.append(part[-1:])
    return torch.cat(last) if last else logits[:0]


def choose(
    sequences: Seq[Sequence], logits: Tensor, eos_ids: Seq[int]
) -> list[Sampled]:
    """The next token of each, alone where a batch breaks; an error and any token for a bad one."""
    asked = [sequence.request for sequence in sequences]
    emitted = [sequence.emitted for sequence in sequences]
    try:
        return sample(logits, asked, emitted, eos_ids)
    except Exception:
        chosen = [Sampled(0)] * len(sequences)
    for i, sequence in enumerate(sequences):
        one = slice(i, i + 1)
        try:
            (chosen[i],) = sample(logits[one], asked[one], emitted[one], eos_ids)
        except Exception as error:
            sequence.error = named(error)
    return chosen


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that stands for (seed, token index)."""
    text = f"{seed}:{index}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return (bits >> 11) / (1 << 53)


def _edit(
    logits: Tensor, requests: Seq[Request], emitted: Seq[Seq[int]], eos_ids: Seq[int]
) -> Tensor:
    """Logits with biases, penalties and what `min_tokens` forbids: in the order of vLLM."""
    params = [request.params for request in requests]
    biases = [(row, *bias) for row, x in enumerate(params) for bias in x.logit_bias]
    early = [row for row, x in enumerate(params) if len(emitted[row]) < x.min_tokens]
    forbidden = [(row, end) for row in early for end in params[row].ends(eos_ids)]
    penalised = any(x.penalises for x in params)
    if not (biases or forbidden or penalised):
        return logits
    logits = logits.clone()
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        logits.index_put_(
            _at(rows, tokens, logits), logits.new_tensor(values), accumulate=True
        )
    if penalised:
        _penalise(logits, requests, emitted)
    if forbidden:
        rows, tokens = zip(*forbidden, strict=True)
        logits[_at(rows, tokens, logits)] = -torch.inf
    return logits


def _penalise(logits: Tensor, requests: Seq[Request], emitted: Seq[Seq[int]]) -> None:
    """In place: less for tokens of prompt and answer (repetition), of the answer (the others)."""
    params = [request.params for request in requests]
    rows, tokens, times = list[int](), list[int](), list[int]()
    for row, request in enumerate(requests):
        prompt = request.tokens if params[row].repetition_penalty != 1 else ()
        said = {**dict.fromkeys(prompt, 0), **Counter(emitted[row])}  # token: how often
        rows += [row] * len(said)
        tokens += said.keys()
        times += said.values()
    # of numpy: torch takes six times as long to read lists
    read = torch.from_numpy(np.array([rows, tokens, times], np.int64))
    at, token, count = read.to(logits.device)
    seen = logits[at, token]
    factor = _column([x.repetition_penalty for x in params], logits)[at, 0]
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    seen -= _column([x.frequency_penalty for x in params], logits)[at, 0] * count
    seen -= _column([x.presence_penalty for x in params], logits)[at, 0] * (count > 0)
    logits[at, token] = seen


def _draw(logits: Tensor, params: Seq[SamplingParams], indices: Seq[int]) -> Tensor:
    """Inverse transform sampling: the tokens share a line between them, in their order."""
    best = logits.max(dim=-1, keepdim=True).values
    temperature = _column(
        [max(x.temperature, 1e-30) for x in params], logits
    )  # in fp32 not 0
    shares = (logits - best).div_(temperature).exp_()
    if cut := [row for row, x in enumerate(params) if x.truncates]:
        shares[cut] = _truncate(shares[cut], logits[cut], [params[row] for row in cut])
    sums = shares.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    chance = [uniform(x.seed, index) for x, index in zip(params, indices, strict=True)]
    target = _column(chance, sums) * total
    target = target.minimum(
        total.nextafter(torch.zeros_like(total))
    )  # rounding reaches no end
    return torch.searchsorted(sums, target, right=True)[:, 0]


def _truncate(shares: Tensor, logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Shares [B, V], those that top_k, top_p and min_p leave; others 0. Of equal ones the first.

    How many are left is mostly seen among few; to sort all is what takes long. By logits: shares of
    a high temperature are alike.
    """
    size, limit = shares.shape[-1], max(x.top_k for x in params)
    most = _column([x.top_k or size for x in params], shares)
    for width in (
        *(max(x, limit + 1) for x in LARGEST if max(x, limit + 1) < size),
        size,
    ):
        ranks = torch.arange(width, device=shares.device)
        highest, at = logits.topk(width)
        ranked = shares.gather(-1, at) * (ranks < most)
        known = ranked.sum(-1, keepdim=True, dtype=torch.float64)
        total = torch.where(
            most < width, known, shares.sum(-1, keepdim=True, dtype=torch.float64)
        )
        before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        left = (ranks < most) & (
            before < _column([x.top_p for x in params], total) * total
        )
        left &= ranked >= _column([x.min_p for x in params], shares) * ranked[:, :1]
        count = left.sum(dim=-1, keepdim=True).clamp_min(
            1
        )  # of no numbers none is left
        if int(count.max()) < width:
            break
    least = highest.gather(-1, count - 1)
    above, equal = logits > least, logits == least
    first = equal.cumsum(dim=-1, dtype=torch.int32) <= count - above.sum(
        dim=-1, keepdim=True
    )
    return shares * (above | equal & first)


def _at(rows: Seq[int], tokens: Seq[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Places in [B, V]."""
    rows_, tokens_ = torch.tensor([rows, tokens], dtype=torch.int64, device=like.device)
    return rows_, tokens_


def _column(values: Seq[float], like: Tensor) -> Tensor:
    return like.new_tensor(values)[:, None]
