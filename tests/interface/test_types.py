"""Types of the public names, as a strict type checker sees them in a project that has the package installed."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import thrifty
from thrifty.core.technique import Technique
from thrifty.interface.optimizers import optimizer_named, optimizer_names

ROOT = Path(__file__).parents[2]
HEAD = """import thrifty as th
from torch import nn
model = nn.Linear(2, 2)
class Mine(th.Technique):
    stage, numerics = th.Stage.PRECONDITION, th.Numerics.DIFFERENT
    factor: float = 2.0
"""
MISUSES = """th.Lora(rnk=8)
th.Lora(8)
th.Lora(rank="eight")
th.Cosine(warm=0.1)
Mine(facctor=3.0)
Mine(3.0)
Mine(factor=3.0).factor = 2.0
th.lora
th.optim.AdamW(model, rate=0.1)
th.optim.AdamW(model, 1e-3)
th.optim.Muon(model, scale="none")
th.optim.Adam(model)
th.train(model, modle=3)
th.train(model, [], ranks="two")
th.train(model, []).lss
th.steps("kjv", rank=2)
th.plan(model=model, allow="all")
th.check(datta=[])
th.compare("kjv", {"lion": 3})
th.compare("kjv", {"lion": "lion"}, equal_budget="watts")
th.estimate(model, 4, memry="1GB")
th.estimate(model, 4, allow="all")
th.apply(model, 3)
th.export("runs/a", "b", dtype="int4")
th.list("technique")
th.losses.chunked_cross_entropy(1, 2, 3)
th.datasets.score("vit-digits", method="el3n")
th.datasets.prune("scores.safetensors", order="harder")
th.simulate.cluster("gpt-1t", recompute="some")
th.simulate.attention("trace.safetensors", ["elsa"], filters=["none"])
"""


@pytest.fixture
def errors(tmp_path: Path) -> Any:
    """Checks a file of a project without a configuration of ours; returns its output."""
    project = tmp_path / "project"
    project.mkdir()
    settings = f'preset = "strict"\nsearch-path = ["{ROOT / "src"}"]\npython-interpreter-path = "{sys.executable}"\n'
    (project / "pyrefly.toml").write_text(settings)

    def check(text: str) -> str:
        (project / "user.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pyrefly", "check", "--output-format", "min-text", "user.py"]
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # files of the package have the repository's configuration, for which the checker looks for an interpreter here
        plain |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{plain['PATH']}", "VIRTUAL_ENV": sys.prefix}
        done = subprocess.run(command, cwd=project, env=plain, capture_output=True, text=True)
        return "\n".join(line for line in done.stdout.splitlines() if line.startswith("ERROR"))

    return check


def test_user_code_passes_a_strict_type_checker(errors: Any) -> None:
    assert not errors((ROOT / "tests" / "support" / "typed_user.py").read_text(encoding="utf-8"))


def test_each_misuse_is_an_error_of_types(errors: Any) -> None:
    """A wrong keyword of a technique, an optimizer or a function, a positional setting, a value out of its choices."""
    found = {int(line) for line in re.findall(r"user.py:(\d+)", errors(HEAD + MISUSES))}
    first = HEAD.count("\n") + 1
    passed = [line for number, line in enumerate(MISUSES.splitlines(), first) if number not in found]
    assert not passed and min(found) >= first


def test_every_setting_of_every_technique_has_its_type(errors: Any) -> None:
    """A setting of a type that none has is refused: names and types are known to the checker."""
    public = {name: getattr(thrifty, name) for name in dir(thrifty)}
    named = {f"th.{name}": each for name, each in public.items() if is_technique(each)}
    named |= {f"th.optim.{name}": optimizer_named(name).technique for name in optimizer_names()}
    first = "model, "
    calls = [
        f"{name}({first if name.startswith('th.optim') else ''}{field}=object())"
        for name, kind in named.items()
        for field in inspect.signature(kind).parameters
    ]
    output = errors(HEAD + "\n".join(calls))
    refused = {int(line) for line in re.findall(r"user.py:(\d+).*\[bad-argument-type\]", output)}
    assert len(calls) > 300 and len(refused) == len(calls)


def is_technique(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Technique) and value is not Technique
