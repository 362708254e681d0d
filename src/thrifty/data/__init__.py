"""Real text as batches: sources, tokenizers, packing, and the named sets."""

from thrifty.data.corpus import TextData, open_data

__all__ = ["TextData", "open_data"]
