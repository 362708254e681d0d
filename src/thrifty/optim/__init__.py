"""Optimizers: transform elements, torch optimizer, fused and chunked updates, partition, weight masks."""
