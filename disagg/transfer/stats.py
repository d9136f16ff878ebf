"""What the hand-off of one prompt cost. Knows no clock and nobody who counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HandoffStats:
    """What the KV of one prompt took and what handing it over cost: bytes and milliseconds.

    cached_tokens:  of these, whose exact KV prefill had of another prompt: not computed
    fp16_bytes, fp8_bytes: of the same tokens, uncompressed
    wire_bytes:     every message of the hand-off, both ways, control included
    payload_bytes:  of records, in those messages
    cached_bytes:   not sent, because the decode worker had them of another prompt
    resident_bytes: of the prompt's records at the decode worker
    encode_ms:      compressing
    queue_ms:       the longest that an item waited for its frame to leave
    wire_ms:        from the first frame to the acknowledgement
    verify_ms:      digests and copies at the receiver · admit_ms: from the commit to the engine
    exposed_ms:     from the last item offered to the acknowledgement: what computing did not hide
    attaches:       how often the sender attached; 1 if nothing broke
    link_bytes_per_s: of frames on that link, since the last hand-off on it ended; 0: none came
    attention_error:  relative, of attention outputs, by listed codec and layer group: of prompts
                      that were sampled, see `engine/error_probe.py`
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
    encode_ms: float = 0.0
    queue_ms: float = 0.0
    wire_ms: float = 0.0
    verify_ms: float = 0.0
    admit_ms: float = 0.0
    exposed_ms: float = 0.0
    attaches: int = 1
    link_bytes_per_s: float = 0.0
    attention_error: Mapping[str, Sequence[float]] = field(default_factory=dict)
