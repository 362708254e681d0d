"""Data sets as batches; each kind of data has a package of its own."""
