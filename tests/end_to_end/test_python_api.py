"""The Python interface: a user's own model, and the optimizer in a user's own loop."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import assert_equal
from torch import Tensor, nn

from thrifty.core.errors import ThriftyError
from thrifty.core.recipe import Budget, DataSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.core.user_objects import UserObjects
from thrifty.techniques.memory.recompute import Recompute
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.precision.bfloat16_weights import Bfloat16Weights
from thrifty.training.checkpoint import load
from thrifty.training.run_folder import RunFolder
from thrifty.training.trainer import resume, train

VOCABULARY, WIDTH = 320, 16


class Logits(nn.Module):
    """A model independent of Thrifty: tokens (b, t) to logits (b, t, v)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.memory(self.embedding(tokens))[0])


class Blocks(nn.Module):
    """A model with a list of blocks and a separate head: tokens (b, t) to hidden states (b, t, d)."""

    has_separate_head = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU()) for _ in "123")
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(
    ("dtype", "techniques", "is_told"),
    [(torch.bfloat16, (), True), (torch.bfloat16, (Bfloat16Weights(),), False), (torch.float32, (), False)],
)
def test_weights_with_updates_lost_to_rounding_are_reported(
    dtype: torch.dtype, techniques: tuple[Technique, ...], is_told: bool, common_folder: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        name="run",
        data=DataSettings(source=str(common_folder / "corpus"), vocabulary=VOCABULARY, length=16, batch=8),
        budget=Budget(steps=2),
        techniques=(AdamW(), *techniques),
    )
    train(replace(recipe, objects=UserObjects(model=lambda: Blocks().to(dtype))), tmp_path, quiet=True)
    notices = [each["text"] for each in RunFolder(tmp_path / "run").read_records() if each["kind"] == "notice"]
    assert any("in bfloat16: rounding loses small updates" in text for text in notices) == is_told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Logits, Blocks])
def test_a_users_model_stops_and_resumes_exactly(kind: type[nn.Module], common_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        name="whole",
        data=DataSettings(source=str(common_folder / "corpus"), vocabulary=VOCABULARY, length=16, batch=8),
        budget=Budget(steps=30),
        techniques=(AdamW(lr=3e-2), *([Recompute()] if kind is Blocks else [])),
    )
    whole = train(replace(recipe, objects=UserObjects(model=kind)), tmp_path, quiet=True)
    assert whole["status"] == "finished" and whole["held_out_loss"] < whole["unigram_entropy"] + 0.5
    trained, is_interrupted = 0, True

    def build() -> nn.Module:
        model = kind()

        def request_stop(module: nn.Module, *_: object) -> None:
            nonlocal trained
            trained += module.training and type(next(module.parameters()).data) is Tensor
            if trained == 9 and is_interrupted:
                os.kill(os.getpid(), signal.SIGTERM)

        model.register_forward_hook(request_stop)
        return model

    recipe = replace(recipe, name="cut")
    summary = train(replace(recipe, objects=UserObjects(model=build)), tmp_path, quiet=True)
    assert summary["status"] == "interrupted" and summary["exit_code"] == 143 and 0 < summary["steps"] < 30
    is_interrupted = False
    assert (
        resume(tmp_path / "cut", replace(recipe, objects=UserObjects(model=build)), quiet=True)["status"] == "finished"
    )
    assert_equal(load(tmp_path / "cut" / "checkpoints").tensors, load(tmp_path / "whole" / "checkpoints").tensors)


@pytest.mark.parametrize("what", ["moved", "deleted"])
def test_a_run_with_a_moved_folder_stops_with_a_message(what: str, common_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        name="run",
        data=DataSettings(source=str(common_folder / "corpus"), vocabulary=VOCABULARY, length=16, batch=8),
        budget=Budget(steps=30),
        techniques=(AdamW(lr=3e-2),),
    )

    def losing() -> nn.Module:
        model, calls = Logits(), iter(range(1000))

        def lose(module: nn.Module, *_: object) -> None:
            if (tmp_path / "run" / "records.jsonl").exists() and next(calls) == 9:
                move = shutil.rmtree if what == "deleted" else lambda path: path.rename(tmp_path / "elsewhere")
                move(tmp_path / "run")

        model.register_forward_hook(lose)
        return model

    with pytest.raises(ThriftyError, match="was moved or deleted during the run"):
        train(replace(recipe, objects=UserObjects(model=losing)), tmp_path, quiet=True)
    assert not (tmp_path / "run").exists()
