"""Attention filters of the accelerators' papers: which keys a query attends to, estimated for less than scores cost.

All have one frame: an estimate of the scores, a keep set per query (a mask of pairs, True for what is kept), and exact
softmax attention over that.

keep_sets.py  the frame: what is visible at all, a keep set that leaves no query without a key, attention over it
elsa.py       angles between sign hashes         a3.py        the largest products, searched greedily
sanger.py     scores of 4 bits, a threshold      dota.py      a trained low-rank detector, the same number for all
vitcod.py     one mask for all inputs            spatten.py   tokens and heads that go for good, block after block
patterns.py   windows, first tokens and scattered blocks as masks

In software a mask saves nothing: every one of these goes through all pairs to find out which to keep. They are what
hardware is built for, and what a model has to live with. Where a paper's filter is for encoders, n, the number of keys,
becomes here the number that a query can see. Shapes: b batch, h heads, t queries, s keys, k head width.
"""
