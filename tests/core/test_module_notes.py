"""Notes on modules are copied and pickled with the module, and are not in its state_dict."""

import pickle
import re
from copy import copy, deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import thrifty
from thrifty.core.module_notes import ModuleNote

SIZE: ModuleNote[int] = ModuleNote("size")
LAYERS: ModuleNote[list[nn.Module]] = ModuleNote("layers")


def test_note_is_read_replaced_and_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert SIZE.get(model) is None and SIZE.get(None) is None
    with pytest.raises(KeyError, match="size"):
        SIZE.of(model)
    assert SIZE.set(model[1], 3) == 3 and SIZE.set(model[1], 4) == SIZE.of(model[1]) == 4
    assert list(SIZE.noted(model)) == [("1", model[1])]
    plain = set(vars(nn.Linear(2, 2)))
    assert SIZE.remove(model[1]) == 4 and set(vars(model[1])) == plain


def test_notes_are_copied_and_pickled_but_not_in_state_dict() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    SIZE.set(model, 3)
    LAYERS.set(model, [model[0]])
    assert list(model.state_dict()) == ["0.weight", "0.bias"] and len(list(model.modules())) == 2
    for other in (deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert SIZE.of(other) == 3 and LAYERS.of(other)[0] is other[0] is not model[0]


def test_copied_attributes_keep_their_notes() -> None:
    layer = nn.Linear(2, 2)
    SIZE.set(layer, 3)
    attributes, twin = dict(vars(layer)), copy(layer)
    SIZE.set(layer, 4)
    assert SIZE.of(twin) == 3
    vars(layer).update(attributes)
    assert SIZE.of(layer) == 3


def test_compiled_module_reads_a_changed_note() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * (SIZE.get(self) or 1)

    layer, x = Scaled(2, 2), torch.ones(1, 2)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for size in (None, 2, 3):
        if size is not None:
            SIZE.set(layer, size)
        torch.testing.assert_close(compiled(x), layer(x))
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias) * (size or 1))


def test_note_names_are_unique_in_the_package() -> None:
    files = Path(thrifty.__file__).parent.rglob("*.py")
    names = [name for file in files for name in re.findall(r'= ModuleNote\("(\w+)"\)', file.read_text("utf-8"))]
    assert len(names) > 15 and len(set(names)) == len(names)
