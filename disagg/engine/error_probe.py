"""What compression costs, measured where exact K and V are: while prompts prefill, on samples.

Of every eighth sequence that is handed off, and of each layer group, two heads are encoded by each
listed codec, as a prompt is. The last queries of the prompt attend on these pages and on exact K
and V. Every sample takes other layers and heads. It runs on the host, so that nothing is compiled
for it on a GPU, and what breaks it breaks no request.
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
        self._seen = 0  # prompts that might be samples

    def look(
        self, sequence: Sequence, layer: int, k: Tensor, v: Tensor, done: int
    ) -> None:
        """Measure a layer of a prompt of which all is computed, if it is of a sample.

        k, v: [H, n, D] exact, after RoPE; done: tokens that are computed, of which a layer with a
        window has kept the last ones: it is not measured
        The sums of squares go to `sequence.errors`.
        """
        whole = done == sequence.prompt_len and sequence.handoff is not None
        if not whole or not LEAST_TOKENS <= done <= MOST_TOKENS:
            return
        if layer == 0:
            sequence.sample = None if self._seen % EVERY else self._seen // EVERY
            self._seen += 1
        if (turn := sequence.sample) is None or k.shape[1] < done:
            return
        for spec, plan in self._plans.items():
            index = plan.group_of[layer]
            group, count = plan.groups[index], len(plan.groups[index].layers)
            if group.rank(layer) in (turn % count, (turn + count // 2) % count):
                try:
                    error = _error(
                        group, layer, sequence, k, v, (turn + layer) % group.heads
                    )
                    found = sequence.errors.setdefault(
                        spec, torch.zeros(len(plan.groups), 2)
                    )
                    found[index] += error
                except Exception:
                    log.exception(
                        "the error of %s in layer %d cannot be measured", spec, layer
                    )


def _error(
    group: LayerGroup, layer: int, sequence: Sequence, k: Tensor, v: Tensor, head: int
) -> Tensor:
    """Sums of squares [2]: of what attention outputs are off, and of the outputs."""
    assert sequence.workspace is not None
    queries = sequence.workspace.queries(layer)
    share = queries.last.shape[0] // group.heads
    some = slice(head * share, (head + 1) * share)
    seen = Queries(
        queries.last[some].float().cpu(), queries.squares[head : head + 1].cpu()
    )
    one_k, one_v = k[head : head + 1].cpu(), v[head : head + 1].cpu()
    pages = compress(codec_of(group), one_k, one_v, layer, seen)
    softmax = queries.softmax or Softmax(group.head_dim**-0.5)
    if softmax.sinks is not None:
        softmax = replace(softmax, sinks=softmax.sinks[some].cpu())
    exact = attend_exact(seen.last, one_k.float(), one_v.float(), softmax, None)
    off = pages.attend(seen.last, softmax) - exact
    return torch.stack([off.square().sum(), exact.square().sum()])


def relative_errors(sequence: Sequence) -> dict[str, list[float]]:
    """Of attention outputs, by codec and layer group; empty unless the sequence was a sample."""
    return {
        spec: [float((off / whole).sqrt()) if whole else 0.0 for off, whole in sums]
        for spec, sums in sequence.errors.items()
    }
