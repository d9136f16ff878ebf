"""Requests that a model, a pool or a codec can never serve, and their errors.

All but `check_range` run before a request waits for room.
"""

import math
from collections.abc import Iterable, Sequence

from disagg.codecs.exact import largest_number
from disagg.engine.sequence import Request
from disagg.errors import CapacityError, PromptTooLongError, RequestError
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.slabs import num_slabs_for
from disagg.model.describe import ModelInfo


def check_tokens(request: Request, emitted: Iterable[int], info: ModelInfo) -> None:
    """An error for a prompt beyond the model's context, or tokens that it cannot compute."""
    if len(request.tokens) >= info.context_length:
        raise PromptTooLongError(
            f"prompt of {len(request.tokens)} tokens; the model's context of "
            f"{info.context_length} holds at most {info.context_length - 1} and an answer"
        )
    named = request.params.named_tokens
    for token in (*request.tokens, *emitted, *named, *request.prediction):
        if not 0 <= token < info.vocab_size:
            raise RequestError(
                f"token {token} is outside the vocabulary of {info.vocab_size}"
            )
    media = dict(info.media_ids)
    for token in media.keys() & {*request.tokens}:
        raise RequestError(
            f"token {token} of the prompt is the {media[token]} of this model; "
            "images, videos and sound are not served, only text"
        )


def check_pool(plan: Plan, num_tokens: int, pool: Pool) -> None:
    """PromptTooLongError for a prompt that an empty pool has no room for."""
    records = plan.records(num_tokens + 1)
    try:
        num_slabs = num_slabs_for(records, pool.slab_bytes)
    except CapacityError as error:
        raise PromptTooLongError(f"prompt of {num_tokens} tokens: {error}") from error
    if num_slabs > pool.num_slabs:
        needed = num_slabs * pool.slab_bytes
        raise PromptTooLongError(
            f"prompt of {num_tokens} tokens needs {needed} bytes of KV, in slabs of "
            f"{pool.slab_bytes}; the pool holds {pool.num_slabs * pool.slab_bytes}"
        )


def check_range(plan: Plan, largest: Sequence[float]) -> None:
    """RequestError for a prompt with K or V that its pages cannot hold.

    Pages saturate, so none is infinite, but answers would be silently wrong. The keys of generated
    tokens are like those of the prompt, and are not checked.

    largest: |K| or |V| of each layer
    """
    for layer, size in enumerate(largest):
        group = plan.groups[plan.group_of[layer]]
        limit = largest_number(group)
        if not math.isfinite(size):
            number = "infinite" if math.isinf(size) else "no number"
            raise RequestError(
                f"K or V of layer {layer} is {number}: it overflows the dtype of the model; "
                "--dtype float32 has more range"
            )
        if size > limit:
            raise RequestError(
                f"K or V of layer {layer} goes up to {size:.6g}; codec {group.codec} holds "
                f"numbers up to {limit:.6g}, and raw:dtype=fp32 all of them"
            )
