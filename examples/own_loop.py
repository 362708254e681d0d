"""Use one technique in your own training loop: RigL trains a network with a tenth of its weights.

    python examples/own_loop.py

Prints the accuracy of the dense and of the sparse network, and the modules that the technique changed.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import thrifty as th

STEPS = 600


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train as in any PyTorch tutorial, and return the accuracy on held-out digits."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    is_held_out = torch.arange(len(labels)) % 6 == 0
    train = torch.nonzero(~is_held_out).squeeze(1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
    for step in range(STEPS):
        chosen = train[torch.randint(len(train), (50,), generator=torch.Generator().manual_seed(step))]
        F.cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return (model(pixels[is_held_out]).argmax(1) == labels[is_held_out]).float().mean().item()


def main() -> None:
    dense = build()
    print(f"dense: accuracy {train(dense, th.optim.AdamW(dense, lr=2e-3)):.3f}")
    sparse = build()
    optimizer = th.optim.AdamW(sparse, lr=2e-3)
    sparse, optimizer = th.apply((sparse, optimizer), "rigl", density=0.1, where=".", every=50, total_steps=STEPS)
    print(f"sparse: accuracy {train(sparse, optimizer):.3f}")
    weights = [layer.weight for layer in sparse if isinstance(layer, torch.nn.Linear)]
    print(f"nonzero weights: {sum(int((w != 0).sum()) for w in weights) / sum(w.numel() for w in weights):.1%}")
    print(th.summary(sparse))


if __name__ == "__main__":
    main()
