"""Real text as batches: sources, tokenizers, packing, and the named sets."""

from thrifty.data.text.text_data import TextData, open_text

__all__ = ["TextData", "open_text"]
