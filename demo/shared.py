"""What all programs of the demo share: model, batches, clock, and the loss on held-out text."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

VOCABULARY, LENGTH, WIDTH, BLOCKS, HEADS = 2048, 256, 256, 4, 4
BATCH, SEED = 8, 0
RATE = 3e-3
"""Learning rate of AdamW: the best of 1e-3, 3e-3 and 6e-3 for this loop."""
HELD_OUT = 32
"""Number of held-out rows in an evaluation."""
STEPS_BETWEEN = 20
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
    """Decoder with learned positions; shape (batch, tokens) to (batch, tokens, vocabulary)."""

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


def prepare(documents: list[str], folder: Path) -> None:
    """Train a tokenizer on `documents`, and write it and the token rows to `folder`. Every 20th document is held out."""
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
    rows = {}
    for name, texts in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        ids = torch.tensor([token for text in tokenizer.encode_batch(texts) for token in (*text.ids, 0)])
        rows[name] = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    rows["held_out"] = rows["held_out"][:HELD_OUT]
    torch.save(rows, folder / "rows.pt")


def rows(folder: Path, part: str) -> torch.Tensor:
    """Return the token rows of "train" or "held_out", of shape (rows, LENGTH + 1)."""
    return torch.load(folder / "rows.pt", weights_only=True)[part]


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


@torch.no_grad()
def held_out_loss(model: nn.Module, folder: Path) -> float:
    parts = rows(folder, "held_out").split(BATCH)
    was_training = model.training
    model.eval()
    loss = sum(loss_of(model, part).item() for part in parts) / len(parts)
    model.train(was_training)
    return loss


class Clock:
    """Seconds of training after the first step, without evaluations. The first step compiles and allocates."""

    def __init__(self, folder: Path, name: str, seconds: float):
        self.folder, self.name, self.limit = folder, name, seconds
        self.seconds, self.steps, self.curve = 0.0, 0, []
        self._since = time.perf_counter()

    def is_over_after_step(self, model: nn.Module) -> bool:
        """Count a step, evaluate when it is due, and return True if the time is over."""
        self.steps += 1
        if self.steps > 1:
            self.seconds += time.perf_counter() - self._since
        is_over = self.seconds >= self.limit
        if is_over or self.steps % STEPS_BETWEEN == 0:
            self.add(self.seconds, held_out_loss(model, self.folder))
        self._since = time.perf_counter()
        return is_over

    def add(self, seconds: float, loss: float) -> None:
        self.curve.append((seconds, loss))

    def save(self, model: nn.Module) -> None:
        """Write the curve, and a text that the model generates."""
        ended = {"steps": self.steps, "curve": self.curve, "text": generate(model, self.folder)}
        (self.folder / f"{self.name}.json").write_text(json.dumps(ended))


@torch.no_grad()
def generate(model: nn.Module, folder: Path, prompt: str = "And the LORD said unto", tokens: int = 40) -> str:
    """Return `prompt` and the text that follows: temperature 0.7, the 40 most likely tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.eval()
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    torch.manual_seed(SEED)
    for _ in range(tokens):
        best = model(ids)[0, -1].div(0.7).topk(40)
        ids = torch.cat([ids, best.indices[best.values.softmax(0).multinomial(1)][None]], 1)
    return " ".join(tokenizer.decode(ids[0].tolist()).split())
