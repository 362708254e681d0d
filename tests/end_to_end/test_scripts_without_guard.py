"""A script without `if __name__ == "__main__":` whose call starts processes gets an error with the fix."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import thrifty as th

inputs = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())


def build():
    return torch.nn.Linear(4, 2)


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


recipe = th.recipe(build, data, held_out=data, loss=loss, budget="4 steps", batch=8)
"""
CALLS = {
    "compare": 'th.compare(recipe, {"lion": ["-adamw", "lion"]}, equal_budget="steps", quiet=True)',
    "sweep": 'th.sweep(recipe, over={"optimizers.adamw.lr": [1e-3, 1e-2]}, quiet=True)',
    "ranks": "th.train(recipe=recipe, ranks=2, quiet=True)",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "compare" else pytest.mark.slow) for name in CALLS]
)
def test_unguarded_call_is_refused_with_the_fix(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + CALLS[name])
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    *_, what, fix = done.stderr.strip().split("\n")
    assert done.returncode == 1 and "a started process imports the script" in what
    assert fix == '  fix: put the call below `if __name__ == "__main__":`'
