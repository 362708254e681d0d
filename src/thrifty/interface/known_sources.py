"""`datasets.known`: the catalog of named datasets and pretrained models. PyTorch is not imported."""

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from thrifty.core.cache_dir import cache_folder
from thrifty.data.catalogue import CatalogueEntry, entries
from thrifty.reporting.printed_result import PrintedResult, lines


@dataclass(frozen=True, repr=False)
class KnownSources(PrintedResult):
    """Catalog of datasets and models: name, size, licence, and presence on this machine."""

    entries: tuple[CatalogueEntry, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"cache": str(cache_folder()), "entries": [_described(each) for each in self.entries]}

    def __rich__(self) -> RenderableType:
        printed = []
        for each in self.entries:
            state = "here" if each.present else f"thrifty data get {each.name}"
            printed.append(f"{each.name:<14} {each.kind:<6} {each.size / 1e6:>6.1f} MB  {state}")
            printed.append(f"    {each.about}\n    licence: {each.licence}")
        return lines(*printed, f"\ncache: {cache_folder()}")


def known() -> KnownSources:
    """Return the catalog of datasets and models that have a name in Thrifty.

    Example::

        print(thrifty.datasets.known())
    """
    return KnownSources(tuple(entries().values()))


def _described(each: CatalogueEntry) -> dict[str, Any]:
    """Return a catalog entry as plain data."""
    return {
        "name": each.name,
        "kind": each.kind,
        "about": each.about,
        "bytes": each.size,
        "download_bytes": sum(package.size for package in each.needed),
        "licence": each.licence,
        "origin": each.origin,
        "present": each.present,
        "folder": str(each.model_folder if each.kind == "model" else each.folder) if each.packages else None,
    }
