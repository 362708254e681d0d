"""Origin and integrity of downloaded data sets."""

import json

from thrifty.core.errors import IntegrityError
from thrifty.data.catalogue import CatalogueEntry
from thrifty.data.data_cache import file_sha256

DOCUMENTS = "documents.jsonl"

ORIGIN = "ORIGIN.json"


def read_origin(entry: CatalogueEntry) -> dict:
    """Return ORIGIN.json of a downloaded entry. Raises IntegrityError if the file is damaged."""
    try:
        origin = json.loads((entry.folder / ORIGIN).read_text(encoding="utf-8"))
        return origin | {"files": dict(origin["files"])}
    except (ValueError, KeyError, TypeError):
        raise IntegrityError(f"{entry.folder}: {ORIGIN} is damaged", fix=f"thrifty data get {entry.name}") from None


def find_damage(entry: CatalogueEntry) -> str:
    """Return a message that names the first damaged file (wrong sha256), or an empty string."""
    try:
        files = read_origin(entry)["files"]
    except IntegrityError:
        return f"{ORIGIN} is damaged"
    for name, sha256 in files.items():
        path = entry.folder / name
        if not path.is_file() or file_sha256(path) != sha256:
            return f"{name} is damaged"
    return ""
