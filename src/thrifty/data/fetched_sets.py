"""The origin of a downloaded data set, and whether its folder is undamaged."""

import json

from thrifty.core.errors import IntegrityError
from thrifty.data.catalogue import CatalogueEntry
from thrifty.data.data_cache import file_sha256

DOCUMENTS = "documents.jsonl"

ORIGIN = "ORIGIN.json"


def read_origin(entry: CatalogueEntry) -> dict:
    """What ORIGIN.json says of a fetched entry; raises IntegrityError where it is damaged."""
    try:
        said = json.loads((entry.folder / ORIGIN).read_text(encoding="utf-8"))
        return said | {"files": dict(said["files"])}
    except (ValueError, KeyError, TypeError):
        raise IntegrityError(f"{entry.folder}: {ORIGIN} is damaged", fix=f"thrifty data get {entry.name}") from None


def find_damage(entry: CatalogueEntry) -> str:
    """What is wrong with the fetched files, or nothing: each must have the sha256 it was written with."""
    try:
        files = read_origin(entry)["files"]
    except IntegrityError:
        return f"{ORIGIN} is damaged"
    for name, sha256 in files.items():
        path = entry.folder / name
        if not path.is_file() or file_sha256(path) != sha256:
            return f"{name} is damaged"
    return ""
