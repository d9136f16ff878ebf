"""The model room: Hugging Face decoder-only models whose KV lives elsewhere.

The only room that knows transformers. It knows codecs and kernels; no pool, no wire, no scheduler.
"""
