"""Names of tokenizer files and special tokens, and the separation of words by a tokenizer."""

import json
from collections.abc import Mapping
from typing import Any

TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
START_OF_TEXT = "<|startoftext|>"
"""First token of a text in CLIP's tokenizer. Tokenizers trained by Thrifty do not have this token."""
END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eos|>", "[SEP]")
"""End-of-text tokens of known tokenizers, in order of preference."""


def joins_words(tokenizer: Mapping[str, Any]) -> bool:
    """Return True for the content of a byte-level tokenizer.json without a space before each word. Training on words
    adds this space, and exported tokenizers do."""
    splitter, normalizer = (json.dumps(tokenizer.get(stage)) for stage in ("pre_tokenizer", "normalizer"))
    return '"ByteLevel"' in splitter and '"Prepend"' not in normalizer
