"""Drawn models of transformers and hand-written oddities with drawn techniques.

A run trains and resumes bit for bit, or is refused with a fix. Each case is kept by its seed.
"""

import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_models import DrawnModel, drawn_model
from drawn_settings import fitting_settings
from tiny_runs import technique

import thrifty
from thrifty import techniques
from thrifty.core.errors import ThriftyError
from thrifty.core.technique import Technique

CASES, EACH, STEPS = 120, 2, 4
LEFT_OUT = ("parallelism.", "compile", "sparsity.mask_from_file")
"""Techniques that require ranks, a compiler or a file."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(CASES))
def test_drawn_techniques_train_and_resume_or_are_refused(seed: int, tmp_path: Path) -> None:
    model, draw = drawn_model(seed), random.Random(f"techniques {seed}")
    names = [name for name in techniques.own_names() if not name.startswith(LEFT_OUT)]
    for name in draw.sample(names, EACH):
        one = technique(name, **(fitting_settings(name, seed) if draw.random() < 0.5 else {}))
        case = f"{model.name} with {one}"
        try:
            whole = trained(model, one, tmp_path / "whole", name)
        except ThriftyError as refused:
            assert refused.fix and "does not work on this model" not in refused.what, case
            continue
        assert math.isfinite(whole.loss), case
        stop = lambda record: record.step < 2  # noqa: E731
        trained(model, one, tmp_path / "parts", name, observers=[stop])
        again = thrifty.resume(tmp_path / "parts" / name, model=model.build, **of(model), quiet=True)
        assert equal(whole.load_model(), again.load_model()), case


def trained(model: DrawnModel, one: Technique, runs: Path, name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own configurations
        options |= {"techniques": [one], "budget": STEPS, "batch": 6, "runs": runs, "name": name}
        return thrifty.train(model.build, quiet=True, **of(model), **options)


def of(model: DrawnModel) -> dict[str, Any]:
    return {"data": model.data, "held_out": model.data, "loss": model.loss}


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    values = other.state_dict()
    return all(torch.equal(value, values[name]) for name, value in one.state_dict().items())
