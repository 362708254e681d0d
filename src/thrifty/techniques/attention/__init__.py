"""Sparse and efficient attention: compute fewer query-key pairs, or the same ones faster."""
