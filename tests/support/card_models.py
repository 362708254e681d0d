"""Objects that the "Use" lines of cards name: tiny models, data, an optimizer."""

import itertools
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from pair_runs import write_crosses
from safetensors.torch import save_file
from tiny_models import VOCABULARY, random_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import thrifty

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


class Texts(Dataset[dict[str, Tensor]]):
    """64 texts of 32 tokens, each its own label."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (64, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


class Images(Dataset[tuple[Tensor, int]]):
    """64 images (3, 32, 32) of 10 classes."""

    def __init__(self) -> None:
        self.pixels = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.pixels[number], number % 10


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _model() -> nn.Module:
    config = transformers.LlamaConfig(
        **_SIZES, vocab_size=VOCABULARY, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=None
    )
    return random_model(config).train()


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**_SIZES, vocab_size=VOCABULARY, max_position_embeddings=64)
    return transformers.BertForMaskedLM(config).train()


def _vit() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**_SIZES, image_size=32, patch_size=8, num_labels=10)
    return transformers.ViTForImageClassification(config).train()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(ResidualBlock(32) for _ in range(4)))


def _image_batch(examples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    pixels, labels = zip(*examples, strict=True)
    return {"pixel_values": torch.stack(pixels), "labels": torch.tensor(labels)}


class Names(dict[str, Any]):
    """Local names of "Use" lines; each object is built when a line first reads it."""

    def __missing__(self, name: str) -> Any:
        makers = {
            "thrifty": lambda: thrifty,
            "torch": lambda: torch,
            "model": _model,
            "encoder": _encoder,
            "vit": _vit,
            "network": _network,
            "optimizer": lambda: thrifty.optim.AdamW(self["model"], lr=1e-3),
            "texts": Texts,
            "held_out": Texts,
            "images": Images,
            "held_out_images": Images,
            "loader": lambda: DataLoader(Texts(), batch_size=8),
            "image_loader": lambda: DataLoader(Images(), batch_size=8, collate_fn=_image_batch),
        }
        if name not in makers:
            raise KeyError(name)
        self[name] = makers[name]()
        return self[name]


_SMALL = {"data.batch": 4, "data.length": 32, "data.vocabulary": 300, "evaluation.examples": 4}


def shortened(lines: str) -> str:
    """Shorten every budget of a run to four steps, and its texts if it reads a file."""
    if "settings=own" in lines:
        lines = lines.replace("settings=own", f"settings={{**own, **{_SMALL}}}")
    small = f", settings={_SMALL}" if "my.txt" in lines and "settings=" not in lines else ""
    return re.sub(r'budget="[^"]*"', f'budget="4 steps"{small}', lines)


def write_files(folder: Path, lines: str) -> None:
    """Write the files that the lines name: a text, masks of the weights of `model`, images with captions."""
    if "mask.safetensors" in lines:
        weights = {name: each for name, each in _model().named_parameters() if "mlp" in name}
        save_file({name: torch.rand_like(each) < 0.5 for name, each in weights.items()}, folder / "mask.safetensors")
    if '"captions"' in lines:
        (folder / "captions").mkdir()
        write_crosses(folder / "captions", 256)
    (folder / "my.txt").write_text("\n\n".join(f"The cat sat on mat {i} and saw {i * i} dogs." for i in range(1000)))


def take_steps(names: Names, steps: int = 2) -> None:
    """Train the models that the lines named for some steps, with their loader and optimizer if they have one."""
    for name, loader in (("model", "loader"), ("encoder", "loader"), ("vit", "image_loader")):
        if name in names or loader in names:
            for batch in itertools.islice(names[loader], steps):
                _step(names, names[name](**batch).loss)
    if "network" in names:
        for _ in range(steps):
            _step(names, names["network"](torch.randn(4, 32)).square().mean())


def _step(names: Names, loss: Tensor) -> None:
    assert loss.isfinite()
    loss.backward()
    if "optimizer" in names:
        names["optimizer"].step()
        names["optimizer"].zero_grad()
