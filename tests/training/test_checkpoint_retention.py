"""Extra checkpoints of a recipe are saved and kept."""

from dataclasses import replace
from pathlib import Path

import torch

from thrifty.core.recipe import CheckpointSettings
from thrifty.training import checkpoint_index
from thrifty.training.checkpoint import save


def test_checkpoints_of_extra_steps_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, {"w": torch.full((2,), float(step))}, {"step": step}, keep=2, also={2, 4})
    assert [checkpoint_index.step_of(path) for path in checkpoint_index.checkpoints(tmp_path)] == [2, 4, 6, 7]
    save(tmp_path, 8, {"w": torch.zeros(2)}, {"step": 8}, keep=1)
    assert [checkpoint_index.step_of(path) for path in checkpoint_index.checkpoints(tmp_path)] == [8]


def test_extra_steps_in_a_recipe() -> None:
    assert CheckpointSettings().extra_steps == ()
    assert replace(CheckpointSettings(), extra_steps=(0.5, 3)).extra_steps == (0.5, 3)
