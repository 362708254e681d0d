"""Parallel training: divide model, data or layers over several ranks."""
