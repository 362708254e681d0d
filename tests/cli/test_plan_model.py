"""Errors of user functions that build a model, by the name of the function."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.user_objects import UserObjects
from thrifty.core.user_sources import import_function


def failing(kind: type[Exception] = KeyError) -> nn.Module:
    raise kind("width")


def test_failing_builders_are_named_with_their_exception() -> None:
    with pytest.raises(UsageError, match=r"test_plan_model:failing builds no model: KeyError: 'width'") as error:
        UserObjects(failing).build_model()
    assert error.value.fix and isinstance(error.value.__cause__, KeyError)
    with pytest.raises(UsageError, match=r"test_plan_model:failing builds no model: ValueError: width"):
        UserObjects(partial(failing, ValueError)).build_model()


@pytest.mark.parametrize("made", [lambda: None, lambda: {"width": 2}, lambda: nn.Linear])
def test_a_builder_that_returns_no_module_is_refused(made: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"lambda> returns a (NoneType|dict|type), not a torch\.nn\.Module") as error:
        UserObjects(made).build_model()
    assert "return the model" in error.value.fix


@pytest.mark.parametrize("kind", [RefusedError, MemoryError, torch.OutOfMemoryError])
def test_errors_with_a_fix_are_left_unchanged(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="width"):
        UserObjects(partial(failing, kind)).build_model()


def test_a_built_model_is_used_unchanged() -> None:
    model = nn.Linear(2, 2)
    assert UserObjects(lambda: model).build_model() is model


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'", "correct the error"),
        ("width = 1 / 0", "ZeroDivisionError", "correct the error"),
        ("def build(:", "SyntaxError", "correct the error"),
    ],
)
def test_modules_failing_on_import_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str, fix: str
) -> None:
    (tmp_path / "broken_builders.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="broken_builders cannot be imported") as error:
        import_function("broken_builders:build")
    assert said in error.value.what and fix in error.value.fix and error.value.__cause__ is not None
