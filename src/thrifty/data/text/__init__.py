"""Text: sources, readers, token cache, windows, pairs of texts."""
