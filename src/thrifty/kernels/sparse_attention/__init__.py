"""Softmax attention over a kept subset of all query-key pairs, forward and backward, on any device.

visibility.py       pairs visible by position: causality, a window, first tokens, texts that share a row
block_grid.py       kept blocks of pairs: windows, global and random blocks, the blocks of a mask
block_attention.py  whole blocks of pairs: dense products over kept blocks, the fast path
block_layout.py     memory layout of blocks, and groups of blocks processed together
row_attention.py    single pairs: the same number of keys for every query

Memory for the backward pass, and every temporary result, is proportional to the number of kept pairs, or smaller. A
query without kept keys gets zeros. Shapes: b batch, h heads, g key-value heads, t queries, s keys, k head width; T and
S blocks of queries and keys.
"""
