import re

import pytest

from thrifty.core.errors import UsageError
from thrifty.data.catalogue import entries, entry
from thrifty.data.download import text_extractors


@pytest.mark.parametrize("name", entries())
def test_every_entry_is_complete(name):
    item = entry(name)
    assert item.about and item.licence and item.origin and item.size > 0
    assert not item.documents or callable(getattr(text_extractors, item.documents))
    assert not item.instead or entry(item.instead).kind == item.kind
    assert bool(item.packages) == bool(item.members)
    hashes = [*item.members.values(), *(package.sha256 for package in item.packages)]
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in hashes)
    assert all(package.client in ("pip", "npm", "apt") and package.folder.endswith("/") for package in item.packages)


@pytest.mark.parametrize("name", [name for name, item in entries().items() if item.packages])
def test_download_never_runs_code_of_a_package(name):
    for package in entry(name).packages:
        command = package.command()
        of_pip = {"--only-binary=:all:", "--no-deps"} <= set(command)
        assert of_pip or "--ignore-scripts" in command or command[:2] == ["apt-get", "download"]


def test_only_python_sources_are_present_at_first():
    assert [name for name, item in entries().items() if item.present] == ["python-stdlib", "python-functions"]


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UsageError, match="did you mean 'minilm-l6'"):
        entry("minilm-16")
