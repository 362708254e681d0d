"""Random Hugging Face models in real folders, a tokenizer and tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Return a function that writes a random model of a config to a new folder and returns folder and model."""

    def write(config: Any, **options: Any) -> tuple[Path, Any]:
        model = random_model(config)
        folder = tmp_path / f"theirs-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, **options)
        return folder, model

    return write


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, save: Callable[..., tuple[Path, Any]]) -> tuple[Path, Any]:
    return save(FAMILIES[request.param]())


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """Return a byte-level BPE of 300 tokens, with <|endoftext|> first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["In the beginning was the word, and the word was with the other words."] * 5, trainer
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
