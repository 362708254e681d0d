"""Train your own module on your own dataset and loss: digits of scikit-learn, in a few seconds.

    python examples/train_own_module.py

Prints the accuracy on held-out digits, and the command that resumes the run.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import thrifty as th


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def loss(model, batch):
    """Return one loss per example, so that every guarantee of the trainer holds."""
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels, reduction="none")


def accuracy(model, batch):
    pixels, labels = batch
    return (model(pixels).argmax(1) == labels).float()


def main() -> None:
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    is_held_out = torch.arange(len(labels)) % 6 == 0
    train = TensorDataset(pixels[~is_held_out], labels[~is_held_out])
    held_out = TensorDataset(pixels[is_held_out], labels[is_held_out])
    run = th.train(
        build,
        train,
        held_out=held_out,
        loss=loss,
        metrics={"accuracy": accuracy},
        techniques=[th.AdamW(lr=1e-2), th.Cosine(warmup=0.1), "ema"],
        budget="20 epochs",
        batch=50,
        settings={"evaluation.examples": 300},
        name="digits",
        quiet=True,
    )
    print(f"held-out loss {run.loss:.3f}, accuracy {run.metrics['accuracy']:.3f}")
    print(f"report: {run.report().page}")


if __name__ == "__main__":
    main()
