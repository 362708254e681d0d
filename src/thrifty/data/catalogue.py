"""Catalogue of named data sets and pretrained models, read from `catalogue.toml`.

Thrifty does not include the data. `thrifty data get NAME` downloads the package of an entry from its registry with pip,
npm or apt. `python-stdlib` and `python-functions` exist on every machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:  # torch takes seconds to import
    from thrifty.core.recipe import DataSettings, ModelSettings

PYTHON_STDLIB = "python-stdlib"
PYTHON_FUNCTIONS = "python-functions"
ALWAYS_HERE = (PYTHON_STDLIB, PYTHON_FUNCTIONS)


@dataclass(frozen=True)
class CataloguePackage:
    """An archive in a package registry: a wheel (pip), a tarball (npm), or a Debian package (apt)."""

    client: str
    """Program that downloads the package: "pip", "npm" or "apt"."""
    name: str
    version: str
    sha256: str
    size: int
    """Download size in bytes."""
    folder: str
    """Folder in the archive that contains all required members; ends in a slash."""

    def command(self, into: str = ".") -> list[str]:
        """Return the command that downloads the archive into folder `into` without running code of the archive.

        apt ignores `into` and writes into the current folder.
        """
        if self.client == "apt":
            return ["apt-get", "download", f"{self.name}={self.version}"]
        if self.client == "npm":
            return ["npm", "pack", "--ignore-scripts", "--pack-destination", into, f"{self.name}@{self.version}"]
        options = ["--no-deps", "--only-binary=:all:", "--dest", into]
        return ["python", "-m", "pip", "download", *options, f"{self.name}=={self.version}"]

    def archive(self, folder: Path) -> Path | None:
        """Return the path of the downloaded archive in `folder`; None if the archive is missing."""
        if self.client == "apt":
            pattern = f"{self.name}_{self.version.replace(':', '%3a')}_*.deb"
        elif self.client == "npm":
            pattern = f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"
        else:
            pattern = f"{self.name.replace('-', '_')}-{self.version}-*.whl"
        return next(folder.glob(pattern), None)


@dataclass(frozen=True)
class CatalogueEntry:
    """A set of texts, conversations, images or images with captions, or a pretrained model.

    `catalogue.toml` explains the fields.
    """

    name: str
    about: str
    size: int
    licence: str
    origin: str
    packages: tuple[CataloguePackage, ...] = ()
    members: Mapping[str, str] = field(default_factory=dict)
    documents: str = ""
    conversations: str = ""
    images: str = ""
    pairs: str = ""
    together: bool = False
    instead: str = ""

    @property
    def kind(self) -> str:
        """Kind of data: "text", "chats", "images", "pairs" or "model"."""
        if self.images or self.pairs:
            return "images" if self.images else "pairs"
        if self.conversations or self.name == PYTHON_FUNCTIONS:
            return "chats"
        return "model" if self.packages and not self.documents else "text"

    @property
    def needed(self) -> tuple[CataloguePackage, ...]:
        """Packages to download: all if the set requires all (`together`), otherwise the first of the alternatives."""
        return self.packages if self.together else self.packages[:1]

    @property
    def folder(self) -> Path:
        """Folder of the downloaded files and ORIGIN.json. The files are documents.jsonl, image arrays, or a model."""
        return cache_folder() / ("models" if self.kind == "model" else "sets") / self.name

    @property
    def model_folder(self) -> Path:
        """Folder of a model's config.json. For a GGUF file, it is the folder of the converted model."""
        return self.folder / "huggingface" if any(name.endswith(".gguf") for name in self.members) else self.folder

    @property
    def present(self) -> bool:
        return self.name in ALWAYS_HERE or (self.folder / "ORIGIN.json").is_file()


@cache
def entries() -> dict[str, CatalogueEntry]:
    """Return all data sets and models of the catalogue by name."""
    tables = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    return {name: _entry(name, table) for name, table in tables.items()}


def entry(name: str) -> CatalogueEntry:
    """Return the catalogue entry `name`. Raises UsageError with the nearest name if there is no such entry."""
    if name not in entries():
        raise UsageError(f"there is no set or model named {name!r}", fix=did_you_mean(name, entries()))
    return entries()[name]


def folder_of_model(name: str) -> Path | None:
    """Return the folder of a model of the catalogue, which may not be downloaded yet; None for another name."""
    known = entries().get(name)
    return known.model_folder if known is not None and known.kind == "model" else None


def refuse_model_to_be_fetched(folder: Path) -> None:
    """Raise UsageError if `folder` belongs to a catalogue model that is not downloaded."""
    models = (entry for entry in entries().values() if entry.kind == "model")
    named = next((entry for entry in models if entry.model_folder == folder), None)
    if named is not None and not (folder / "config.json").is_file():
        raise UsageError(f"the model {named.name!r} is not on this machine yet", fix=f"thrifty data get {named.name}")


def use_model_tokenizer(settings: DataSettings, model: ModelSettings) -> DataSettings:
    """Return data settings that use the tokenizer in the model's folder, unless a tokenizer is set."""
    if settings.tokenizer or not model.folder:
        return settings
    folder = Path(model.folder)
    refuse_model_to_be_fetched(folder)
    return replace(settings, tokenizer=str(folder / "tokenizer.json"))


def _entry(name: str, table: dict) -> CatalogueEntry:
    packages = tuple(CataloguePackage(**package) for package in table.pop("packages", ()))
    return CatalogueEntry(name=name, packages=packages, **table)
