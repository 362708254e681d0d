from pathlib import Path

import pytest
from command_line import CommandLine, beside, write_corpus


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, in which commands of all tests run; its tokens are prepared once."""
    folder = tmp_path_factory.mktemp("common_folder")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture
def thrifty(common_folder: Path) -> CommandLine:
    """Return the command line in a separate folder for each test, with the shared corpus next to it."""
    return beside(common_folder)
