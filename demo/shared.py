"""What all programs of the demo share: model, batches, clock, and the loss on held-out text."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

VOCABULARY, LENGTH, WIDTH, BLOCKS, HEADS = 2048, 256, 128, 4, 4
BATCH, SEED = 8, 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATE = 2e-3
"""Learning rate of AdamW. It has the lowest loss after 200 steps of 1.5e-3, 2e-3, 3e-3 and 6e-3, constant or
decaying."""
HELD_OUT = 24
"""Number of held-out rows in an evaluation."""
STEPS_PER_EVALUATION = 10
"""Number of steps between evaluations."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.before_attention(x)).chunk(3, -1)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Decoder with learned positions and GPT-2's initial values, from tokens (b, t) to logits (b, t, v)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> GPT:
    torch.manual_seed(SEED)
    return GPT()


def prepare(documents: list[str], prompt: str, folder: Path) -> None:
    """Train a tokenizer on `documents`, and write it and the token ids to `folder`. Every 20th document is held
    out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    parts = {"train": [text for i, text in enumerate(documents) if i % 20], "held_out": documents[::20]}
    rows = {"prompt": torch.tensor([tokenizer.encode(prompt).ids])}
    for name, texts in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        ids = torch.tensor([token for text in tokenizer.encode_batch(texts) for token in (*text.ids, 0)])
        rows[name] = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    rows["held_out"] = rows["held_out"][:HELD_OUT]
    torch.save(rows, folder / "rows.pt")


def rows(folder: Path, part: str) -> torch.Tensor:
    """Return the token rows of "train" or "held_out", (rows, LENGTH + 1), or the tokens of the "prompt", (1, t)."""
    return torch.load(folder / "rows.pt", weights_only=True, map_location=DEVICE)[part]


def batches(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield batches in a new random order per epoch, without end."""
    shuffled = torch.Generator().manual_seed(SEED)
    while True:
        for chosen in torch.randperm(len(rows), generator=shuffled).split(BATCH):
            if len(chosen) == BATCH:
                yield rows[chosen]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens in nats."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


class Clock:
    """Seconds of training after the first step, without evaluations, and the held-out loss at these seconds.

    The first step compiles and allocates. It is measured from the start of the program's training.
    """

    def __init__(self, folder: Path):
        self.held_out = rows(folder, "held_out").split(BATCH)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.prompt = rows(folder, "prompt")
        self.steps, self.seconds, self.first, self.curve = 0, 0.0, 0.0, []
        self.since = time.perf_counter()

    def after_step(self, model: nn.Module) -> None:
        """Count a step, and evaluate if it is due."""
        self.count(time.perf_counter() - self.since)
        if self.steps % STEPS_PER_EVALUATION == 0:
            self.evaluate(model)
        self.since = time.perf_counter()

    def count(self, seconds: float) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first = seconds
        else:
            self.seconds += seconds

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> None:
        """Add a point with the mean held-out loss to the curve."""
        was_training = model.training
        model.eval()
        loss = sum(loss_of(model, part).item() for part in self.held_out) / len(self.held_out)
        model.train(was_training)
        self.curve.append((self.seconds, loss))

    def result(self, model: nn.Module) -> dict[str, Any]:
        """Return number of steps, seconds of the first step, curve, and a text that the model generates."""
        self.evaluate(model)
        text = self.tokenizer.decode(generate(model, self.prompt)[0].tolist())
        return {"steps": self.steps, "first": self.first, "curve": self.curve, "text": " ".join(text.split())}


@torch.no_grad()
def generate(model: nn.Module, ids: torch.Tensor, tokens: int = 50) -> torch.Tensor:
    """Return the token ids (1, t) and those that follow: temperature 0.7, the 40 most likely tokens."""
    model.eval()
    random = torch.Generator(DEVICE).manual_seed(SEED)
    for _ in range(tokens):
        best = model(ids)[0, -1].float().div(0.7).topk(40)
        chosen = best.values.softmax(0).multinomial(1, generator=random)
        ids = torch.cat([ids, best.indices[chosen][None]], 1)
    return ids
