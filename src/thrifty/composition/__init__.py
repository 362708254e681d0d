"""Compose techniques into a run: compose, explain, step footprint, micro-batches, state transfer."""
