"""Attention over pages, for any codec: append a step, seal full pages, attend.

It knows codecs and kernels; it does not know pools, wires or models.
"""

from disagg.paged.compressed_kv import CompressedKV, compress

__all__ = ["CompressedKV", "compress"]
