"""A small tokenizer with the special tokens of ChatML, and conversations for training."""

import json
from pathlib import Path

from thrifty.data.chat.chat_tokenizer import TURNS, ChatTokenizer, set_template
from thrifty.data.tokenizer import train_tokenizer

TEXT = [
    "What is the capital of France? The capital is Paris.",
    "Rewrite this verse in modern English, please: he saith unto them",
    "def add(a, b):\n    return a + b\n",
    "  two spaces,\ttabs, and naïve façades: 12345 🙂 日本語",
]


def small_tokenizer(template: str = "") -> ChatTokenizer:
    return set_template(train_tokenizer(TEXT, 400, TURNS), template)


def exchange(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def sums(count: int) -> list[dict[str, list[dict[str, str]]]]:
    return [exchange(f"What is {n} and {n % 7}?", f"It is {n + n % 7}." + " Sure." * (n % 5)) for n in range(count)]


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
