"""Attention filters of the accelerators' papers: which keys a query attends to, estimated for less than scores cost.

All have one frame: an estimate of the scores, a keep set per query (a mask of pairs, True for what is kept), and exact
softmax attention over that.

keep_masks.py     the frame: visible pairs, a keep set that leaves no query without a key, attention over it
elsa_filter.py    angles between sign hashes
a3_filter.py      the largest products, searched greedily
sanger_filter.py  scores of 4 bits, a threshold
dota_filter.py    a trained low-rank detector, the same number for all
vitcod_filter.py  one mask for all inputs
spatten_filter.py tokens and heads that go for good, block after block

In software a mask saves nothing: every one of these goes through all pairs to find out which to keep. They are what
hardware is built for, and what a model has to live with. Where a paper's filter is for encoders, n, the number of keys,
becomes here the number that a query can see. Shapes: b batch, h heads, t queries, s keys, k head width.
"""
