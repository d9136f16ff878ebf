"""The error of compression, measured on samples of prompts while their exact K and V are here.

Every eighth sequence that is handed off is a sample. In two layers of each layer group one head is
encoded by each listed codec, as a prompt is. The last queries of the prompt attend on these pages
and on exact K and V. Each sample takes other layers and heads. It runs on the host, so that nothing
is compiled for it on a GPU; an error in it fails no request.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from disagg.codecs.contract import Queries
from disagg.codecs.planning import codec_of
from disagg.engine.sequence import Sequence
from disagg.kernels.view import Softmax
from disagg.kv.plan import LayerGroup, Plan
from disagg.model.attention import attend_exact
from disagg.paged.compressed_kv import compress

EVERY = 8
LEAST_TOKENS, MOST_TOKENS = 256, 8192  # of a sample: enough pages, and a bounded cost

log = logging.getLogger(__name__)


class CodecErrorProbe:
    """Measures the error of attention outputs under each of some plans."""

    def __init__(self, plans: Iterable[Plan]):
        self._plans = {plan.spec: plan for plan in plans}
        self._candidates = 0  # prompts that could have been samples

    def measure(
        self, sequence: Sequence, layer: int, k: Tensor, v: Tensor, done: int
    ) -> None:
        """Measure a layer of a computed prompt, if the prompt is a sample.

        k, v: [H, n, D] exact, after RoPE
        done: tokens computed; a layer with a window has only the last ones, and is not measured
        The sums of squares go to `sequence.errors`.
        """
        is_computed = done == sequence.prompt_len and sequence.handoff is not None
        if not is_computed or not LEAST_TOKENS <= done <= MOST_TOKENS:
            return
        if layer == 0:
            sample, remainder = divmod(self._candidates, EVERY)
            sequence.sample = None if remainder else sample
            self._candidates += 1
        if sequence.sample is None or k.shape[1] < done:
            return
        for spec, plan in self._plans.items():
            try:
                self._measure_codec(spec, plan, sequence, sequence.sample, layer, k, v)
            except Exception:
                log.exception(
                    "the error of %s in layer %d cannot be measured", spec, layer
                )

    def _measure_codec(
        self,
        spec: str,
        plan: Plan,
        sequence: Sequence,
        sample: int,
        layer: int,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Add the error under one plan, if the sample takes this layer."""
        index = plan.group_of[layer]
        group = plan.groups[index]
        count = len(group.layers)
        if group.rank(layer) not in (sample % count, (sample + count // 2) % count):
            return
        head = (sample + layer) % group.heads
        error = _error(group, layer, sequence, k, v, head)
        if spec not in sequence.errors:
            sequence.errors[spec] = torch.zeros(len(plan.paged), 2)
        sequence.errors[spec][index] += error


def _error(
    group: LayerGroup, layer: int, sequence: Sequence, k: Tensor, v: Tensor, head: int
) -> Tensor:
    """Sums of squares [2]: of the error of attention outputs, and of the outputs."""
    assert sequence.workspace is not None
    queries = sequence.workspace.queries(layer)
    query_heads = queries.last.shape[0] // group.heads  # of one KV head
    of_head = slice(head * query_heads, (head + 1) * query_heads)
    head_queries = Queries(
        queries.last[of_head].float().cpu(),
        queries.squares[head : head + 1].cpu(),
    )
    head_k = k[head : head + 1].cpu()
    head_v = v[head : head + 1].cpu()
    pages = compress(codec_of(group), head_k, head_v, layer, head_queries)
    softmax = queries.softmax or Softmax(group.head_dim**-0.5)
    if softmax.sinks is not None:
        softmax = replace(softmax, sinks=softmax.sinks[of_head].cpu())
    exact = attend_exact(
        head_queries.last, head_k.float(), head_v.float(), softmax, None
    )
    difference = pages.attend(head_queries.last, softmax) - exact
    return torch.stack([difference.square().sum(), exact.square().sum()])


def relative_errors(sequence: Sequence) -> dict[str, list[float]]:
    """Of attention outputs, by codec and layer group; empty unless the sequence was a sample."""
    return {
        spec: [float((error / total).sqrt()) if total else 0.0 for error, total in sums]
        for spec, sums in sequence.errors.items()
    }
