"""What a model and a pool can serve at all; errors that say so before a request waits for room."""

from collections.abc import Iterable

from disagg.engine.sequence import Request
from disagg.errors import PromptTooLongError, RequestError
from disagg.kv.plan import Plan
from disagg.model.describe import ModelInfo


def check_tokens(request: Request, emitted: Iterable[int], info: ModelInfo) -> None:
    """An error for a prompt beyond the model's context, or tokens outside its vocabulary."""
    if len(request.tokens) >= info.context_length:
        raise PromptTooLongError(
            f"prompt of {len(request.tokens)} tokens; the model's context of "
            f"{info.context_length} holds at most {info.context_length - 1} and an answer"
        )
    for token in (*request.tokens, *emitted, *request.params.named_tokens):
        if not 0 <= token < info.vocab_size:
            raise RequestError(
                f"token {token} is outside the vocabulary of {info.vocab_size}"
            )


def check_pool(plan: Plan, num_tokens: int, pool_bytes: int) -> None:
    """PromptTooLongError for a prompt that an empty pool has no room for."""
    needed = plan.nbytes(num_tokens + 1)
    if needed > pool_bytes:
        raise PromptTooLongError(
            f"prompt of {num_tokens} tokens needs {needed} bytes of KV; "
            f"the pool holds {pool_bytes}"
        )
