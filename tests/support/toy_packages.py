"""Packages of a toy data set, as files that pip and npm install."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

from thrifty.data.catalogue import CatalogueEntry, CataloguePackage
from thrifty.data.download.dataset_download import listing_sha256

TALES = {"one.txt": b"It was a dark night.", "two.txt": b"It was a bright morning."}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def wheel(folder: Path, members, name="toy_tales", version="1.0"):
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for member, content in members.items():
            file.writestr(f"{name}/data/{member}", content)
        file.writestr(f"{info}/METADATA", about)
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def tarball(folder: Path, members, name="toy-tales", version="1.0"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}.tgz"
    with tarfile.open(path, "w:gz") as file:
        for member, content in members.items():
            item = tarfile.TarInfo(f"package/data/{member}")
            item.size = len(content)
            file.addfile(item, io.BytesIO(content))
    return path


def package(client="pip", name="toy-tales", archive_sha256="0" * 64):
    folder = "package/data/" if client == "npm" else f"{name.replace('-', '_')}/data/"
    return CataloguePackage(client, name, "1.0", archive_sha256, 1000, folder)


def tales(*packages, **changes):
    fields = {
        "name": "toy",
        "about": "two tales",
        "size": 44,
        "licence": "CC0-1.0",
        "origin": "this test",
        "packages": packages or (package(),),
        "members": {"*.txt": listing_sha256(TALES)},
        "documents": "whole_files",
        "instead": "kjv",
    }
    return CatalogueEntry(**(fields | changes))
