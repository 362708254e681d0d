from pathlib import Path

import pytest
from command_line import CommandLine, beside, write_corpus


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, where commands of all tests run; its prepared tokens are made once."""
    folder = tmp_path_factory.mktemp("common_folder")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture
def thrifty(common_folder: Path) -> CommandLine:
    """The command line in a folder of this test's own, the shared corpus beside it."""
    return beside(common_folder)
