"""The shape of the KV cache that is sent, and what its prompts need of a pool."""

from collections import Counter
from dataclasses import dataclass

from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import PromptTooLongError
from disagg.page import Kind
from disagg.plan import Plan

SLAB_BYTES = 16 << 20


@dataclass(frozen=True)
class Shape:
    """Layers, KV heads and head dim; as they are in Llama 3.1 8B. Tensors are fp16."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128

    def plan(self, spec: str) -> Plan:
        """The plan of a codec."""
        windows = (None,) * self.layers
        return parse_plan(spec, KVShape(self.layers, self.heads, self.head_dim, "float16", windows))

    def fp16_bytes(self, tokens: int) -> int:
        """Exact K and V of so many tokens."""
        return 2 * 2 * tokens * self.layers * self.heads * self.head_dim


def slabs_for(
    plan: Plan, tokens: int, slab_bytes: int = SLAB_BYTES, sequences: int = 1, spare: int = 0
) -> int:
    """How many slabs prompts take; PromptTooLongError where a record does not fit any.

    spare: records of every layout that each sequence has besides, to grow into
    """
    total = 0
    for group in plan.groups:
        inventory = group.inventory(tokens)
        counts = Counter(dict.fromkeys(group.layouts(), spare))
        for kind in Kind:
            if count := inventory.count(kind):
                counts[group.layout(kind)] += count
        for layout, count in (+counts).items():  # those of which there are any
            nbytes = group.record(layout).nbytes
            if nbytes > slab_bytes:
                raise PromptTooLongError(f"a record of {nbytes} bytes; slabs: {slab_bytes}")
            total += -(-sequences * count // (slab_bytes // nbytes))
    return total
