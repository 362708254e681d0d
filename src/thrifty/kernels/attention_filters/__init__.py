"""Attention filters from accelerator papers: cheap estimates of the keys that a query should attend to.

All filters have three parts: an estimate of the scores, a keep set per query, and exact softmax attention over the keep
set. A keep set is a mask of query-key pairs, True for kept pairs.

keep_masks.py     shared parts: visible pairs, keep sets with at least one key per query, attention over keep sets
elsa_filter.py    angles between sign hashes
a3_filter.py      the largest products of single elements, by greedy search
sanger_filter.py  4-bit scores and a threshold
dota_filter.py    a trained low-rank detector, the same number of keys for all queries
vitcod_filter.py  one fixed mask for all inputs
spatten_filter.py cascade pruning of tokens and heads, block by block

In software a mask saves no computation, because each filter processes all pairs to find the kept pairs. Accelerators
save the work; here the filters show the effect on the model's quality. Some papers describe filters for encoders, with
n keys. Here n is the number of keys that a query can see. Shapes: b batch, h heads, t queries, s keys, k head width.
"""
