import sysconfig
from pathlib import Path

import pytest
import torch

from thrifty.data.text.document_sources import open_source
from thrifty.data.text.python_sources import python_files


def test_sources_include_library_and_torch_but_no_tests():
    files = python_files()
    library, own = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
    assert library / "json" / "decoder.py" in files
    assert sum(own in path.parents for path in files) > 500
    assert not [path for path in files if {"test", "tests"} & set(path.relative_to(path.anchor).parts)]


@pytest.mark.parametrize("size", [15_000_000, 40_000_000])
def test_size_limit_is_nearly_reached(size):
    taken = sum(path.stat().st_size for path in python_files(size))
    assert 0.9 * size < taken <= size


def test_every_file_reads_as_text():
    documents = sum(len(text) for text in open_source("python-stdlib").documents())
    assert documents > 30_000_000
