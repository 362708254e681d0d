"""Text data: sources, readers, token cache, windows and pairs of texts."""
