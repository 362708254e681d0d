"""Attention filters from accelerator papers: cheap estimates of the keys that a query attends to.

All share one frame: an estimate of the scores, a keep set per query, and exact softmax attention over the keep set. A
keep set is a mask of pairs, True for kept ones.

keep_masks.py     the frame: visible pairs, keep sets with at least one key per query, attention over them
elsa_filter.py    angles between sign hashes
a3_filter.py      the largest products, by greedy search
sanger_filter.py  4-bit scores and a threshold
dota_filter.py    a trained low-rank detector, the same number of keys for all queries
vitcod_filter.py  one mask for all inputs
spatten_filter.py cascade pruning of tokens and heads, block by block

In software a mask saves nothing, because each filter processes all pairs to find the kept ones. Special hardware saves
the work; here the filters show the effect on the model. If a paper's filter is for encoders, n, the number of keys,
becomes the number of keys that a query can see. Shapes: b batch, h heads, t queries, s keys, k head width.
"""
