"""From logits to tokens, and to log-probabilities: one pass over a whole batch, on its device.

Randomness is a function of the seed and the token's index, and of nothing else. So a token does not
depend on the batch it is sampled in, on the worker, or on how often its sequence was started. The
sampler has no state that would have to move with a sequence.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from disagg.engine.grammars import NO_MASKS, TokenMasks
from disagg.engine.messages import as_disagg_error
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import Logprobs, Request, SamplingParams
from disagg.errors import DisaggError, RequestError

# how many of the largest logits are sorted at first; a full sort is slow and rarely needed
TRUNCATION_WIDTHS = (256, 4096)
LEAST_TEMPERATURE = 1e-30  # smaller ones would be 0 in fp32
LEAST_LOGPROB = -9999.0  # of a token that the model excludes, as in OpenAI's API


@dataclass(frozen=True)
class Sampled:
    """A token, and its log-probabilities if the request asks for them."""

    token: int
    logprobs: Logprobs | None = None


def sample(
    logits: Tensor,
    requests: Seq[Request],
    emitted: Seq[Seq[int]],
    eos_ids: Seq[int] = (),
    masks: TokenMasks = NO_MASKS,
) -> list[Sampled]:
    """One token for each row.

    logits:  [B, V] fp32
    emitted: per row, the tokens of the answer so far
    eos_ids: tokens that end a text; none of them comes before `min_tokens`
    masks:   tokens that the grammars of rows allow
    RequestError if the logits of a row are NaN, or all infinite
    """
    vocab_size = logits.shape[-1]
    params = [request.params for request in requests]
    scores = masks.applied(_edit(logits, requests, emitted, eos_ids))
    best, tokens = scores.max(dim=-1)  # on a CPU argmax takes twice as long
    tokens = tokens.where(best.isfinite(), vocab_size)
    random_rows = [row for row, x in enumerate(params) if x.temperature]
    if random_rows:
        tokens[random_rows] = _draw(
            scores[random_rows],
            params=[params[row] for row in random_rows],
            indices=[len(emitted[row]) for row in random_rows],
        )
    ids = tokens.tolist()
    if max(ids, default=0) >= vocab_size:
        raise RequestError(
            "no token can be drawn: after the request's grammar, biases and penalties its "
            "logits are NaN or infinite"
        )
    logprobs = _requested_logprobs(logits, tokens, params)
    return [Sampled(token, logprobs.get(row)) for row, token in enumerate(ids)]


def _requested_logprobs(
    logits: Tensor,
    tokens: Tensor,
    params: Seq[SamplingParams],
) -> dict[int, Logprobs]:
    """The log-probabilities of the tokens [B], by row, for the rows that ask for them."""
    counts = {row: x.logprobs for row, x in enumerate(params) if x.logprobs is not None}
    if not counts:
        return {}
    rows = list(counts)
    logprobs = logprobs_of(logits[rows], tokens[rows], list(counts.values()))
    return dict(zip(rows, logprobs, strict=True))


def logprobs_of(
    logits: Tensor,
    tokens: Tensor,
    counts: Seq[int],
) -> list[Logprobs]:
    """The model's own log-probabilities of tokens, before any edit by sampling parameters.

    Models that mask the padding of a vocabulary give it minus infinity, which JSON does not have.
    That becomes `LEAST_LOGPROB`.

    logits: [B, V]
    tokens: [B]
    counts: per row, how many of the likeliest tokens to report
    """
    logprobs = logits.float().log_softmax(dim=-1).clamp_min(LEAST_LOGPROB)
    own = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    width = min(max(counts, default=0), logprobs.shape[-1])
    best = logprobs.topk(width)
    best_values = best.values.tolist()
    best_ids = best.indices.tolist()
    rows: list[Logprobs] = []
    for row, count in enumerate(counts):
        likeliest = zip(best_ids[row][:count], best_values[row][:count], strict=True)
        rows.append((own[row], tuple(likeliest)))
    return rows


def score_prompts(scheduled: Seq[ScheduledTokens], logits: Tensor) -> Tensor:
    """Store the log-probabilities of scored prompts; return the logits of the next tokens.

    logits:  [rows, V], the outputs of all scheduled tokens
    returns: [tokens that are sampled, V]
    """
    if not any(entry.scores for entry in scheduled):
        return logits
    next_logits = []
    parts = logits.split([entry.outputs for entry in scheduled])
    for entry, part in zip(scheduled, parts, strict=True):
        if entry.scores:
            _score_chunk(entry, part)
        next_logits.append(part[len(part) - entry.choices :])
    return torch.cat(next_logits)


def _score_chunk(entry: ScheduledTokens, logits: Tensor) -> None:
    """Append the log-probabilities of the prompt's tokens behind those of a chunk."""
    sequence = entry.sequence
    del sequence.scores[sequence.n :]  # left over from a start that was preempted
    first = sequence.n + 1
    tokens = sequence.request.tokens[first : first + entry.count]
    sequence.scores += logprobs_of(
        logits[: len(tokens)],
        torch.tensor(tokens, dtype=torch.int64, device=logits.device),
        [sequence.request.params.logprobs or 0] * len(tokens),
    )


def choose(
    entries: Seq[ScheduledTokens],
    logits: Tensor,
    eos_ids: Seq[int],
    masks: TokenMasks = NO_MASKS,
) -> list[list[Sampled]]:
    """The next tokens of each sequence: one, and one for each token of its draft that was right.

    entries: those that complete their sequence
    logits:  [tokens that are sampled, V]
    masks:   for the rows of `logits`
    If the batch fails, each row is sampled by itself. A sequence whose next token cannot be sampled
    gets the error, unless it has an earlier one.
    """
    requests = []
    emitted: list[Seq[int]] = []
    for entry in entries:
        requests += [entry.sequence.request] * entry.choices
        emitted += _answers(entry)
    results: list[Sampled | DisaggError]
    try:
        results = [*sample(logits, requests, emitted, eos_ids, masks)]
    except Exception:
        results = _sample_each(logits, requests, emitted, eos_ids, masks)
    for row, error in masks.errors.items():
        results[row] = error
    chosen = []
    row = 0
    for entry in entries:
        chosen.append(_verified(entry, results[row : row + entry.choices]))
        row += entry.choices
    return chosen


def _answers(entry: ScheduledTokens) -> list[Seq[int]]:
    """The answer before each token that is sampled, as if the draft were right."""
    emitted = entry.sequence.emitted
    drafts = (entry.draft[:count] for count in range(1, 1 + len(entry.draft)))
    return [emitted, *([*emitted, *draft] for draft in drafts)]


def _sample_each(
    logits: Tensor,
    requests: Seq[Request],
    emitted: Seq[Seq[int]],
    eos_ids: Seq[int],
    masks: TokenMasks,
) -> list[Sampled | DisaggError]:
    """The token of each row, or why there is none."""
    results: list[Sampled | DisaggError] = []
    for i in range(len(requests)):
        row = slice(i, i + 1)
        try:
            results += sample(
                logits[row], requests[row], emitted[row], eos_ids, masks.of_row(i)
            )
        except Exception as error:
            results.append(as_disagg_error(error))
    return results


def _verified(
    entry: ScheduledTokens, results: Seq[Sampled | DisaggError]
) -> list[Sampled]:
    """The tokens up to the first that is not the draft's, which is sampled too."""
    sequence = entry.sequence
    tokens: list[Sampled] = []
    for result, drafted in zip_longest(results, entry.draft):
        if isinstance(result, DisaggError):
            if not tokens:
                sequence.error = sequence.error or result
            break
        tokens.append(result)
        if result.token != drafted:
            break
    return tokens


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of the seed and the token's index."""
    text = f"{seed}:{index}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return (bits >> 11) / (1 << 53)


def _edit(
    logits: Tensor,
    requests: Seq[Request],
    emitted: Seq[Seq[int]],
    eos_ids: Seq[int],
) -> Tensor:
    """Logits [B, V] after biases, penalties and `min_tokens`, in the order of vLLM."""
    params = [request.params for request in requests]
    biases = [(row, *bias) for row, x in enumerate(params) for bias in x.logit_bias]
    early_ends = _early_ends(params, emitted, eos_ids)
    has_penalties = any(x.penalises for x in params)
    if not (biases or early_ends or has_penalties):
        return logits
    logits = logits.clone()
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        entries = _entries(rows, tokens, logits.device)
        logits.index_put_(entries, logits.new_tensor(values), accumulate=True)
    if has_penalties:
        _penalise(logits, requests, emitted)
    if early_ends:
        rows, tokens = zip(*early_ends, strict=True)
        logits[_entries(rows, tokens, logits.device)] = -torch.inf
    return logits


def _early_ends(
    params: Seq[SamplingParams],
    emitted: Seq[Seq[int]],
    eos_ids: Seq[int],
) -> list[tuple[int, int]]:
    """Tokens that `min_tokens` excludes, each with its row."""
    return [
        (row, token)
        for row, x in enumerate(params)
        if len(emitted[row]) < x.min_tokens
        for token in x.ends(eos_ids)
    ]


def _penalise(
    logits: Tensor,
    requests: Seq[Request],
    emitted: Seq[Seq[int]],
) -> None:
    """Lower the logits of tokens that came before, in place.

    The repetition penalty is for tokens of prompt and answer, the others are for those of the
    answer.
    """
    params = [request.params for request in requests]
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []  # in the answer
    for row, request in enumerate(requests):
        token_counts: dict[int, int] = {}
        if params[row].repetition_penalty != 1:
            token_counts.update(dict.fromkeys(request.tokens, 0))
        token_counts.update(Counter(emitted[row]))
        rows += [row] * len(token_counts)
        tokens += token_counts.keys()
        counts += token_counts.values()
    # through numpy: torch takes six times as long to read lists
    entries = torch.from_numpy(np.array([rows, tokens, counts], np.int64))
    row_ids, token_ids, times = entries.to(logits.device)
    repetition = _column([x.repetition_penalty for x in params], logits)[row_ids, 0]
    frequency = _column([x.frequency_penalty for x in params], logits)[row_ids, 0]
    presence = _column([x.presence_penalty for x in params], logits)[row_ids, 0]
    scores = logits[row_ids, token_ids]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores -= frequency * times
    scores -= presence * (times > 0)
    logits[row_ids, token_ids] = scores


def _draw(
    logits: Tensor,
    params: Seq[SamplingParams],
    indices: Seq[int],
) -> Tensor:
    """One token [B] for each row of logits [B, V], by inverse transform sampling.

    The probabilities of the tokens lie side by side on a line, in the order of their ids; a random
    point on the line picks the token. indices: of the tokens to draw, within their answers
    """
    best = logits.max(dim=-1, keepdim=True).values
    temperatures = [max(x.temperature, LEAST_TEMPERATURE) for x in params]
    # proportional to probabilities: 1 for the most likely token
    weights = (logits - best).div_(_column(temperatures, logits)).exp_()
    truncated = [row for row, x in enumerate(params) if x.truncates]
    if truncated:
        weights[truncated] = _truncate(
            weights[truncated],
            logits[truncated],
            [params[row] for row in truncated],
        )
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    points = [
        uniform(x.seed or 0, index) for x, index in zip(params, indices, strict=True)
    ]
    target = _column(points, sums) * total
    # rounding must not reach the end of the line
    target = target.minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True)[:, 0]


def _truncate(
    weights: Tensor,
    logits: Tensor,
    params: Seq[SamplingParams],
) -> Tensor:
    """Weights [B, V] without the tokens that top_k, top_p and min_p exclude: those get 0.

    The largest few usually decide how many survive: try those before a full sort. The order is that
    of logits, since at a high temperature weights are equal; of equal logits the first survive.
    """
    vocab_size = weights.shape[-1]
    largest_top_k = max(x.top_k for x in params)
    widths = [max(width, largest_top_k + 1) for width in TRUNCATION_WIDTHS]
    for width in (*(x for x in widths if x < vocab_size), vocab_size):
        highest, ids = logits.topk(width)
        count = _survivors(weights, weights.gather(-1, ids), params)
        if int(count.max()) < width:
            break
    least = highest.gather(-1, count - 1)
    is_above = logits > least
    is_equal = logits == least
    num_equal = count - is_above.sum(dim=-1, keepdim=True)
    is_first = is_equal.cumsum(dim=-1, dtype=torch.int32) <= num_equal
    return weights * (is_above | is_equal & is_first)


def _survivors(
    weights: Tensor,
    highest: Tensor,
    params: Seq[SamplingParams],
) -> Tensor:
    """How many of the most likely tokens survive [B, 1], at least 1 and at most the width.

    weights: [B, V]
    highest: [B, width], those of the most likely tokens in descending order
    """
    width = highest.shape[-1]
    ranks = torch.arange(width, device=weights.device)
    top_k = _column([x.top_k or weights.shape[-1] for x in params], weights)
    top_p = [x.top_p for x in params]
    min_p = _column([x.min_p for x in params], weights)
    # as in vLLM, min_p comes first: top_p is a share of what it leaves
    least = min_p * highest[:, :1]
    survives = (ranks < top_k) & (highest >= least)
    ranked = highest * survives
    total = torch.where(
        top_k < width,
        ranked.sum(-1, keepdim=True, dtype=torch.float64),
        (weights * (weights >= least)).sum(-1, keepdim=True, dtype=torch.float64),
    )
    sum_before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    survives &= sum_before < _column(top_p, total) * total
    # NaN survives nowhere
    return survives.sum(dim=-1, keepdim=True).clamp_min(1)


def _entries(
    rows: Seq[int],
    tokens: Seq[int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Indices of entries of [B, V]."""
    indices = torch.tensor([rows, tokens], dtype=torch.int64, device=device)
    return indices[0], indices[1]


def _column(values: Seq[float], like: Tensor) -> Tensor:
    """Values [B] as [B, 1], with the dtype and device of another tensor."""
    return like.new_tensor(values)[:, None]
