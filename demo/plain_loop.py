"""The training loop of PyTorch's tutorials: float32, eager, AdamW with a constant learning rate.

    python demo/plain_loop.py SECONDS FILE [compile]

With `compile`, the model is compiled with torch.compile.
"""

import sys
from pathlib import Path

import torch
from shared import Race, build, loss_of, open_data, sample

LEARNING_RATE = 3e-3


def main() -> None:
    seconds, file, *options = sys.argv[1:]
    data = open_data()
    model = build(data)
    forward = torch.compile(model) if "compile" in options else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    race = Race(data, float(seconds), forward)
    is_over = False
    while not is_over:
        tokens = data.train.at(race.steps)["tokens"]
        loss = loss_of(forward(tokens[:, :-1]), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        is_over = race.is_over()
    race.save(Path(file), sample(model, data))


if __name__ == "__main__":
    main()
