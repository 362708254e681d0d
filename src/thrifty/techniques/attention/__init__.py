"""Sparse and efficient attention: compute fewer query-key pairs, or compute all pairs faster."""
