"""Codecs: how K and V are compressed. `get_codec(spec)` returns one by name and options.

A codec knows layouts and kernels; it knows no pool, no wire and no model.
"""

from disagg.codecs.registry import codec_names, get_codec

__all__ = ["codec_names", "get_codec"]
