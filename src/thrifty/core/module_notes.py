"""Notes that techniques attach to modules of the user's model.

The attribute `thrifty_notes` of a module is a dictionary from the name of a `ModuleNote` to the value of the note.
Notes are copied and pickled with the module. They remain when the module is sharded or compiled in place. They are not
part of a state_dict.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class ModuleNote(Generic[T]):
    """Kind of note, such as `SITES: ModuleNote[list[Site]] = ModuleNote("sites")`. Names are unique in the package."""

    name: str

    def get(self, module: nn.Module | None) -> T | None:
        """Return the note of a module, or None if the module has no such note."""
        return _notes(module).get(self.name)

    def of(self, module: nn.Module) -> T:
        """Return the note of a module. Raise KeyError if the module has no such note."""
        return _notes(module)[self.name]

    def set(self, module: nn.Module, value: T) -> T:
        """Write the note on a module and return it."""
        # a new dictionary, because earlier copies of the module share the old dictionary
        module.thrifty_notes = {**_notes(module), self.name: value}  # type: ignore[assignment]
        return value

    def remove(self, module: nn.Module) -> T:
        """Remove and return the note of a module that has one."""
        notes = dict(_notes(module))
        value = notes.pop(self.name)
        if notes:
            module.thrifty_notes = notes  # type: ignore[assignment]
        else:
            del module.thrifty_notes
        return value

    def noted(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name and module of each module with this note."""
        return ((name, module) for name, module in model.named_modules() if self.name in _notes(module))


def _notes(module: nn.Module | None) -> dict[str, Any]:
    return getattr(module, "thrifty_notes", {})
