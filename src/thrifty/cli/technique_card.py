"""The card of a technique, as `show` and `board` print it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thrifty.experiments.past_results import PastComparison, PastStudy

_SEAMS = ("model", "batches", "objective", "backward", "update", "changes", "footprint", "holds", "finish")


def card_of(name: str) -> dict[str, Any]:
    """A technique's card as plain data: its file's docstring is the text."""
    import dataclasses
    import inspect
    import sys

    from thrifty import techniques
    from thrifty.core.setting_bounds import hints_of

    kind = techniques.find(name)
    name = techniques.full_name(name)
    hints = hints_of(kind)
    return {
        "name": name,
        "stage": kind.stage.label,
        "numerics": kind.numerics.value,
        "claims": sorted(kind.claims),
        "seams": [seam for seam in _SEAMS if seam in vars(kind)],
        "card": inspect.cleandoc(sys.modules[kind.__module__].__doc__ or ""),
        "settings": [
            {"name": field.name, "type": _type_name(hints[field.name]), "default": field.default}
            for field in dataclasses.fields(kind)
        ],
    }


def measured_of(name: str) -> "tuple[list[PastComparison], list[PastStudy]]":
    """The comparisons and the studies in which a technique took part."""
    from thrifty.experiments.past_results import evidence, study_results

    return [comparison for comparison in evidence() if comparison.technique == name], study_results(name)


def _type_name(kind: Any) -> str:
    """A field's type in words: `int, at least 1`, `erk or uniform`, `a fraction of the run, or a number of steps`."""
    import typing

    from thrifty.core.run_relative_settings import StepOrFraction

    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind == StepOrFraction:
        return "a fraction of the run, or a number of steps"
    if origin is typing.Annotated:
        return f"{_type_name(arguments[0])}, {arguments[1]}"
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    return getattr(kind, "__name__", str(kind))
