"""Softmax attention over a kept part of all pairs of queries and keys, forward and backward, on any device.

visibility.py       what a token may see by its place: causality, a window, first tokens, texts that share a row
block_grid.py       which blocks of pairs are kept: windows, global and random blocks, the blocks of a mask
block_attention.py  whole blocks of pairs: dense products over what is kept, the fast way
block_layout.py     how those lie in memory, and which are worked on together
row_attention.py    single pairs: the same number of keys for every query

What is held for the backward pass, and every temporary result, is proportional to what is kept, or smaller. A query
that keeps nothing gets zeros. Shapes: b batch, h heads, g key-value heads, t queries, s keys, k head width; T and S
blocks of queries and keys.
"""
