"""What transformers alone answers: unbatched greedy generation, our yardstick."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig

from disagg.model.describe import describe_model
from tests.model.tiny import auto_class


@dataclass(frozen=True)
class Reference:
    """A greedy continuation, and how far ahead each token was of the second choice, in logits."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


class ReferenceModel:
    """A model as transformers runs it, with attention of its own: the eager one, as its `sdpa` of
    5.17 leaves out the caps of scores."""

    def __init__(self, ref: str | None = None):
        info = describe_model(ref, "float32")
        config = AutoConfig.from_pretrained(info.path)
        self._model = auto_class(config.model_type).from_pretrained(
            info.path,
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation="eager",
        )

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """What it says of the token behind each: [N, V]."""
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def generate(self, prompt: list[int], max_tokens: int) -> Reference:
        """Exactly `max_tokens` greedy tokens behind a prompt, whatever ends a text."""
        ids, mask = (
            torch.tensor([prompt]),
            torch.ones(1, len(prompt), dtype=torch.int64),
        )
        how = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": max_tokens,
            "eos_token_id": None,
        }
        how |= {"pad_token_id": 0, "do_sample": False, "output_logits": True}
        result = self._model.generate(
            ids, attention_mask=mask, return_dict_in_generate=True, **how
        )
        best = torch.cat(result.logits).float().topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        return Reference(
            tuple(result.sequences[0, len(prompt) :].tolist()), tuple(margins)
        )
