"""Real text as batches: sources, tokenizers, packing, and the named sets."""

from thrifty.data.text.text_data import TextData, open_data

__all__ = ["TextData", "open_data"]
