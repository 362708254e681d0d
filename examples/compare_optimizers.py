"""Compare two optimizers fairly: equal steps, tuned learning rates, paired seeds, a verdict with an interval.

    python examples/compare_optimizers.py

The verdict may also be "no difference" or "undecided".
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import thrifty as th

digits = load_digits()
PIXELS, LABELS = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def train_set() -> TensorDataset:
    return TensorDataset(PIXELS[:1500], LABELS[:1500])


def test_set() -> TensorDataset:
    return TensorDataset(PIXELS[1500:], LABELS[1500:])


def loss(model, batch):
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels, reduction="none")


def main() -> None:
    recipe = th.recipe(
        build,
        train_set(),
        held_out=test_set(),
        loss=loss,
        techniques=[th.AdamW(lr=2e-2), "linear"],
        budget="100 steps",
        batch=50,
    )
    verdict = th.compare(
        recipe,
        {"lion": th.Lion(lr=4e-3)},
        equal_budget="steps",
        seeds=7,
        rate_trials=2,
        name="optimizers",
        quiet=True,
    )
    print(verdict.table())
    print(verdict.verdicts["lion"])
    verdict.figure().save("optimizers.svg")


if __name__ == "__main__":
    main()
