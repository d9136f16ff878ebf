"""Weights that a checkpoint stores in few bits: what makes up each of them, and how to unpack it.

tables.py    which tensors a packed weight is made of, with errors that name the wrong one
grid.py      numbers of one byte times the scale of their block: what all formats end in
scaled.py    8-bit numbers and scales: FP8 of several writers, int8
fp4.py       4-bit floats: NVFP4, MXFP4
words.py     int4 and others packed into 32-bit words: GPTQ, AWQ, compressed-tensors
"""
