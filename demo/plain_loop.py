"""The training loop of PyTorch's tutorials: float32, eager, AdamW with a tuned learning rate.

    python demo/plain_loop.py FOLDER SECONDS [compile]

FOLDER has the tokens that demo.py prepared. Prints one JSON document.
"""

import json
import sys
from pathlib import Path

import torch
from shared import DEVICE, RATE, Clock, batches, build, loss_of, rows

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
model = build().to(DEVICE)
trained = torch.compile(model) if sys.argv[3:] == ["compile"] else model
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
clock = Clock(folder)
for batch in batches(rows(folder, "train")):
    loss = loss_of(trained, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    clock.after_step(model)
    if clock.seconds >= seconds:
        break
print(json.dumps(clock.result(model)))
