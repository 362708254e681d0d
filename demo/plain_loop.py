"""The training loop of PyTorch's tutorials: float32, eager, AdamW with a tuned learning rate.

python demo/plain_loop.py FOLDER SECONDS [compile]
"""

import sys
from pathlib import Path

import torch
from shared import RATE, Clock, batches, build, loss_of, rows

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
is_compiled = sys.argv[3:] == ["compile"]
model = build()
step_model = torch.compile(model) if is_compiled else model
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
clock = Clock(folder, "compiled" if is_compiled else "loop", seconds)
for batch in batches(rows(folder, "train")):
    loss = loss_of(step_model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if clock.is_over_after_step(model):
        break
clock.save(model)
