"""The error of compression, measured on samples of prompts while their exact K and V are here.

Every eighth sequence that is handed off is a sample. In two layers of each layer group one head is
encoded by each listed codec, as a prompt is. The last queries of the prompt attend on these pages
and on exact K and V. It runs on the host, so that nothing is compiled for it on a GPU; an error in
it fails no request.

The first sample takes the first and the last layer of a group, where models have their outlier
channels. Later samples take their neighbours, and so on to the middle. Then the first and the last
layer follow again, with the next head.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

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
        The errors go to `sequence.errors`.
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
        """Record the error under one plan, if the sample takes this layer."""
        index = plan.group_of[layer]
        group = plan.groups[index]
        head = head_of_sample(group, layer, sample)
        if head is None:
            return
        error = _error(group, layer, sequence, k, v, head)
        by_group = sequence.errors.setdefault(spec, [{} for _ in plan.paged])
        by_group[index][str(layer)] = error


def head_of_sample(group: LayerGroup, layer: int, sample: int) -> int | None:
    """The KV head that a sample measures in a layer; None: it does not take this layer."""
    count = len(group.layers)
    rounds, number = divmod(sample, -(-count // 2))
    if group.rank(layer) not in (number, count - 1 - number):
        return None
    return (rounds + layer) % group.heads


def _error(
    group: LayerGroup, layer: int, sequence: Sequence, k: Tensor, v: Tensor, head: int
) -> float:
    """The relative error of attention outputs of one KV head."""
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
    pages = compress(
        codec_of(group), head_k, head_v, layer, head_queries, latent=group.latent
    )
    softmax = queries.softmax or Softmax(group.head_dim**-0.5)
    if softmax.sinks is not None:
        softmax = replace(softmax, sinks=softmax.sinks[of_head].cpu())
    exact = attend_exact(
        head_queries.last, head_k.float(), head_v.float(), softmax, None
    )
    difference = pages.attend(head_queries.last, softmax) - exact
    size = float(exact.norm())
    return float(difference.norm()) / size if size else 0.0
