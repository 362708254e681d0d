import tempfile
from pathlib import Path

import pytest

from end_to_end.command_line import CommandLine, write_corpus


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, where commands of all tests run; its prepared tokens are made once."""
    folder = tmp_path_factory.mktemp("workplace")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture
def thrifty(workplace: Path) -> CommandLine:
    """The command line in a folder of this test's own, the shared corpus beside it."""
    folder = Path(tempfile.mkdtemp(dir=workplace))
    (folder / "corpus").symlink_to(workplace / "corpus")
    return CommandLine(folder)
