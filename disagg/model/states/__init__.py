"""Layers that keep a state of fixed size instead of K and V, in one packed row of tokens.

    rows      │ chunk of A │ chunk of B │ c │ d │ e e e e │
    layer       forward(A)   forward(B)   [c, d]  forward(e), a replay
    states      where they are            gathered and scattered

State spaces, linear attention and short convolutions of transformers all ask the `Cache` for their
state, and give it the next one. Their forward is called once for each part of a row, with a cache
that answers for that part. Names no architecture: a layer shows what it keeps when it is called.

step.py      the parts of a row, and the records of their sequences
cache.py     the cache that a layer gets for one part
records.py   the states of sequences in an arena
layouts.py   which layers keep what, and whether they can go on with a chunk
layers.py    the forward of a layer, called for each part
"""
