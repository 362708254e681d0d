"""Data sets as batches: what all kinds share; each kind has a package of its own."""
