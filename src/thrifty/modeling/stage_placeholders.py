"""What stands in a model for modules that another pipeline stage holds, so that all others keep their names.

Elsewhere   gives on what it is given: a block that is not here, a norm behind the last one
Arrival     gives what the stage before sent, whatever it is given: in front of a stage's first block
Departure   keeps what it is given, for the stage after: behind a stage's last block
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class StagePlaceholder(nn.Module):
    """Without parameters or buffers; `original` lends it its plain attributes, which a model may ask for."""

    def __init__(self, original: nn.Module):
        super().__init__()
        plain = {name: value for name, value in vars(original).items() if isinstance(value, bool | int | float | str)}
        vars(self).update({name: value for name, value in plain.items() if not name.startswith("_")})

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


@dataclass
class StageIO:
    """What goes through one stage: hidden states (b, t, d) as they came and as they leave."""

    received: Tensor | None = None
    given: Tensor | None = None


class StageInput(StagePlaceholder):
    def __init__(self, original: nn.Module, passage: StageIO):
        super().__init__(original)
        self.passage = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.passage.received


class StageOutput(StagePlaceholder):
    def __init__(self, original: nn.Module, passage: StageIO):
        super().__init__(original)
        self.passage = passage

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        self.passage.given = hidden
        return hidden


def present(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    return [block for block in blocks if not isinstance(block, StagePlaceholder)]
