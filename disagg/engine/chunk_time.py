"""How long decoding sequences wait for chunks of prompts, where one worker does both."""

from disagg.model.linear import padded_rows, unpadded_rows

LEAST_TOKENS = 256  # of a chunk: smaller ones read all weights for little
NEW_SHARE = 0.3  # of the newest measurement in the mean


class ChunkTime:
    """Sizes chunks by the time that they will take, from the time that earlier ones took.

    limit_s: seconds that a chunk may add to a step; None: no limit
    """

    def __init__(self, limit_s: float | None):
        self._limit_s = limit_s
        # seconds of one token of a prompt, and of a step without prompts; 0: not measured yet
        self._token_s = 0.0
        self._decode_s = 0.0

    def fit(self, most: int, decoding: int) -> int:
        """How many tokens of prompts, at most `most`, a step with decoding tokens computes.

        With those it is a number of rows that layers have kernels for, and `LEAST_TOKENS` at least.
        """
        is_measured = self._token_s and self._decode_s
        if self._limit_s is None or not is_measured:
            return most
        fitting = int(self._limit_s / self._token_s)
        least_rows = padded_rows(decoding + LEAST_TOKENS)
        rows = max(least_rows, unpadded_rows(decoding + fitting))
        return min(most, rows - decoding)

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        """A step took so long, with so many tokens of prompts."""
        if not prompt_tokens:
            self._decode_s = _mean(self._decode_s, seconds)
        elif prompt_tokens >= LEAST_TOKENS // 2:
            token_s = max(0.0, seconds - self._decode_s) / prompt_tokens
            self._token_s = _mean(self._token_s, token_s)


def _mean(mean: float, value: float) -> float:
    return mean + NEW_SHARE * (value - mean) if mean else value
