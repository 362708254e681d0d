"""Settings of a technique: annotated class attributes, keyword-only and frozen."""

from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique


class Scaled(Technique):
    stage, numerics = Stage.ACCUMULATE, Numerics.DIFFERENT
    factor: float = 2.0


@dataclass(frozen=True)
class ScaledTwice(Scaled):
    """Subclass with its own dataclass decorator, which changes nothing."""

    again: float = 3.0


def test_decorated_class_may_have_a_default_factory() -> None:
    @dataclass(frozen=True)
    class Named(Technique):
        stage, numerics = Stage.ACCUMULATE, Numerics.DIFFERENT
        factor: float = 2.0
        names: dict[str, int] = field(default_factory=dict)

    class Inherits(Named):
        more: int = 1

    assert Named().names == {} and Named().names is not Named().names
    assert repr(Inherits(names={"a": 1})) == f"{Inherits.__qualname__}(factor=2.0, names={{'a': 1}}, more=1)"


def test_decorated_class_may_have_slots() -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted(Technique):
        stage, numerics = Stage.ACCUMULATE, Numerics.DIFFERENT
        factor: float = 2.0

    assert replace(Slotted(), factor=3.0) == Slotted(factor=3.0)
    with pytest.raises(FrozenInstanceError):
        Slotted().factor = 3.0  # type: ignore[misc]


def test_settings_are_keyword_only_annotated_attributes() -> None:
    assert Scaled() == Scaled(factor=2.0) != Scaled(factor=3.0) and hash(Scaled()) == hash(Scaled())
    assert replace(ScaledTwice(again=1.0), factor=5.0) == ScaledTwice(factor=5.0, again=1.0)
    assert repr(ScaledTwice()) == "ScaledTwice(factor=2.0, again=3.0)"
    for kind in (Scaled, ScaledTwice):
        with pytest.raises(TypeError, match="positional"):
            kind(3.0)


def test_settings_cannot_be_assigned() -> None:
    for value in (Scaled(), ScaledTwice()):
        with pytest.raises(FrozenInstanceError):
            value.factor = 3.0  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError):
            del value.factor
