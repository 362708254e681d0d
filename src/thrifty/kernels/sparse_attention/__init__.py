"""Softmax attention over a kept subset of all query-key pairs, forward and backward, on any device.

visibility.py       pairs visible by position: causality, a window, first tokens, packed texts
block_grid.py       kept blocks of pairs: windows, global and random blocks, the blocks of a mask
block_attention.py  whole blocks of pairs: dense matmuls over kept blocks, the fast path
block_layout.py     memory layout of blocks, and groups of blocks processed together
row_attention.py    single pairs: the same number of keys for every query

Saved tensors and temporaries are at most proportional to the number of kept pairs. A query without kept keys outputs
zeros. Shapes: b batch, h heads, g key-value heads, t queries, s keys, k head width; T blocks of queries, S blocks of
keys.
"""
