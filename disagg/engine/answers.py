"""What the logits of a step become: log-probabilities of prompts, and the next tokens."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from disagg.engine.messages import named
from disagg.engine.sampler import Sampled, logprobs_of, sample
from disagg.engine.scheduler import Share
from disagg.engine.sequence import Sequence


def score_prompts(shares: Seq[Share], logits: Tensor) -> Tensor:
    """Keep what logits [rows, V] say of prompts; those that give the next tokens."""
    if not any(share.scores for share in shares):
        return logits
    last = []
    for share, part in zip(shares, logits.split([x.outputs for x in shares]), strict=True):
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


def choose(sequences: Seq[Sequence], logits: Tensor, eos_ids: Seq[int]) -> list[Sampled]:
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
