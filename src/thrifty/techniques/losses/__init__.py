"""Auxiliary losses: add a term that stabilizes training."""
