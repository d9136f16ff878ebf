"""The figures of the hand-off of one prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class HandoffStats:
    """Size of one prompt's KV, and what its hand-off cost, in bytes and milliseconds.

    tokens:         of the prompt
    cached_tokens:  of these, tokens whose exact KV the prefill worker had cached: not computed
    fp16_bytes, fp8_bytes: of the same tokens, uncompressed
    wire_bytes:     of every message of the hand-off, both ways, control included
    payload_bytes:  of records, in those messages
    cached_bytes:   of records that were not sent, because the decode worker had cached them
    resident_bytes: of the prompt's records at the decode worker
    state_bytes:    of these, the states of a hybrid model, which have no fp16 to compare with
    wire_state_bytes: the same states as they are handed off, of payload_bytes
    encode_ms:      compression
    queue_ms:       the longest wait of an item until its frame was sent
    wire_ms:        from the first frame to the acknowledgement
    verify_ms:      digests and copies at the receiver
    admit_ms:       from the commit until the decode engine has the prompt
    exposed_ms:     from the last item offered to the acknowledgement: not hidden by computing
    attaches:       how often the sender attached; 1 if nothing broke
    link_bytes_per_s: of frames on that link, since the last hand-off on it ended; 0: none yet
    attention_error:  relative error of attention outputs in two layers of each layer group, by
                      listed codec, group and layer, for prompts that were sampled, see
                      `engine/error_probe.py`
    """

    codec: str
    tokens: int
    fp16_bytes: int
    fp8_bytes: int
    cached_tokens: int = 0
    wire_bytes: int = 0
    payload_bytes: int = 0
    cached_bytes: int = 0
    resident_bytes: int = 0
    state_bytes: int = 0
    wire_state_bytes: int = 0
    encode_ms: float = 0.0
    queue_ms: float = 0.0
    wire_ms: float = 0.0
    verify_ms: float = 0.0
    admit_ms: float = 0.0
    exposed_ms: float = 0.0
    attaches: int = 1
    link_bytes_per_s: float = 0.0
    attention_error: Mapping[str, Sequence[Mapping[str, float]]] = field(
        default_factory=dict
    )


SUMMED = ("wire_bytes", "payload_bytes", "cached_bytes", "link_bytes_per_s")
LONGEST = ("queue_ms", "wire_ms", "verify_ms", "admit_ms", "exposed_ms", "attaches")


def joined(parts: Sequence[HandoffStats]) -> HandoffStats:
    """The figures of a hand-off from those of its parts, which were sent at the same time.

    What was measured before the hand-off is that of the first part.
    """
    totals: dict[str, float] = {}
    for name in SUMMED:
        totals[name] = sum(getattr(part, name) for part in parts)
    for name in LONGEST:
        totals[name] = max(getattr(part, name) for part in parts)
    figures: dict[str, Any] = totals
    return replace(parts[0], **figures)
