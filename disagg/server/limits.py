"""What a prompt must be to be served: the checks that need nothing but its length."""

from disagg.errors import PromptTooLongError, RequestError


def check_prompt(tokens: int, context_length: int) -> None:
    """RequestError for an empty prompt, PromptTooLongError for one with no room behind it."""
    if tokens == 0:
        raise RequestError("the prompt is empty; at least one token is wanted")
    if tokens >= context_length:
        raise PromptTooLongError(
            f"the prompt has {tokens} tokens; the model's context of {context_length} holds at "
            f"most {context_length - 1} and an answer"
        )
