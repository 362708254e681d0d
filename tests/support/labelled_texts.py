"""Small files of labelled texts, and tiny classifiers of transformers for them."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

GOOD, BAD, PLAIN = (
    ("great", "fine", "lovely"),
    ("awful", "poor", "dull"),
    ("a", "film", "with", "actors", "and", "naïve"),
)
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
WORDS = [*SPECIAL, *GOOD, *BAD, *PLAIN]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
DROPOUTS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def text(number: int, kind: int) -> str:
    words = [PLAIN[(number * step) % len(PLAIN)] for step in range(1, 2 + number % 7)]
    return " ".join([*words, (BAD, GOOD)[kind][number % 3], str(number)])


def reviews(count: int = 60) -> list[dict[str, Any]]:
    return [{"text": text(n, n % 2), "label": ("negative", "positive")[n % 2]} for n in range(count)]


def ratings(count: int = 60) -> list[dict[str, Any]]:
    kinds = [(n % 2, n // 2 % 2) for n in range(count)]
    return [
        {"sentence1": text(n, a), "sentence2": text(n + 1, b), "score": float(a == b) * 5 - n % 3 / 4}
        for n, (a, b) in enumerate(kinds)
    ]


def topics(count: int = 60) -> list[dict[str, Any]]:
    return [
        {"text": words, "labels": [name for name in ("great", "awful", "film") if name in words]}
        for words in (text(n, n % 2) for n in range(count))
    ]


def tagged(count: int = 60) -> list[dict[str, Any]]:
    def tag(word: str) -> str:
        return "GOOD" if word in GOOD else "BAD" if word in BAD else "O"

    texts = (text(n, n % 2).split() for n in range(count))
    return [{"tokens": words, "ner_tags": [tag(word) for word in words]} for words in texts]


ROWS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "classification": reviews,
    "regression": ratings,
    "multi_label_classification": topics,
    "token_classification": tagged,
}
"""Rows of labelled texts by objective."""
OUTPUTS = {"classification": 2, "regression": 1, "multi_label_classification": 3, "token_classification": 3}


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]], separator: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_tokenizer(folder: Path) -> None:
    """Write a BERT-style word tokenizer with the tokenizer_config.json of transformers."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=SPECIAL[3]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(SPECIAL))
    inner.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    inner.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def config_of(kind: str, **more: Any) -> Any:
    """Return a tiny configuration of transformers."""
    import transformers

    same = {"vocab_size": len(WORDS), "pad_token_id": 0, "initializer_range": 0.2, **more}
    if kind == "bert":
        return transformers.BertConfig(**SIZES, **DROPOUTS, max_position_embeddings=32, **same)
    if kind == "roberta":
        return transformers.RobertaConfig(**SIZES, **DROPOUTS, max_position_embeddings=34, type_vocab_size=1, **same)
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32}
        rates = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
        return transformers.DistilBertConfig(**sizes, **rates, **same)
    decoders = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
    return decoders[kind](**SIZES, num_key_value_heads=1, max_position_embeddings=32, **same)


def save_model(folder: Path, kind: str, auto: str, **more: Any) -> Path:
    """Write a tiny random model of transformers with its tokenizer to a folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    getattr(transformers, auto).from_config(config_of(kind, **more)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
