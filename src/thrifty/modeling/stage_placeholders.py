"""Placeholders for modules of other pipeline stages, so that all modules keep their names.

StagePlaceholder   returns its input: a block or norm of another stage
StageInput         returns the hidden states received from the previous stage, before a stage's first block
StageOutput        stores its input for the next stage, after a stage's last block
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class StagePlaceholder(nn.Module):
    """A module without parameters or buffers, with copies of the public attributes of `original` that are numbers,
    strings or booleans."""

    def __init__(self, original: nn.Module):
        super().__init__()
        plain = {name: value for name, value in vars(original).items() if isinstance(value, bool | int | float | str)}
        vars(self).update({name: value for name, value in plain.items() if not name.startswith("_")})

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


@dataclass
class StageIO:
    """Hidden states (b, t, d) that a stage receives, and hidden states that it sends."""

    received: Tensor | None = None
    sent: Tensor | None = None


class StageInput(StagePlaceholder):
    def __init__(self, original: nn.Module, stage_io: StageIO):
        super().__init__(original)
        self.stage_io = stage_io

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stage_io.received


class StageOutput(StagePlaceholder):
    def __init__(self, original: nn.Module, stage_io: StageIO):
        super().__init__(original)
        self.stage_io = stage_io

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        self.stage_io.sent = hidden
        return hidden


def present(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    return [block for block in blocks if not isinstance(block, StagePlaceholder)]
