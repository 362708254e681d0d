"""Data sets as batches. Each kind of data has its own package."""
