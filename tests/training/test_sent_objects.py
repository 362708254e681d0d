"""Values sent to processes that this one starts."""

from pathlib import Path

import pytest

from thrifty.core.errors import UsageError
from thrifty.training.sent_objects import read_value, write_value


def test_a_file_writable_by_others_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "value"
    write_value(3, path)
    assert read_value(path) == 3
    path.chmod(0o644)
    with pytest.raises(UsageError, match="is not private"):
        read_value(path)
