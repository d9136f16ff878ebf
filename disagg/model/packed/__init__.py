"""Weights that a checkpoint stores in few bits: their stored tensors, and how to unpack them.

tables.py    which stored tensors make up a packed weight; errors name the wrong one
grid.py      the last step of all formats: numbers of one byte times the scale of their block
scaled.py    8-bit numbers and scales: FP8 of several writers, int8
fp4.py       4-bit floats: NVFP4, MXFP4
words.py     int4 and others packed into 32-bit words: GPTQ, AWQ, compressed-tensors
"""
