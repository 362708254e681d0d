"""`thrifty board` as it is called: what it prints, and who can read the address that it keeps."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from thrifty.cli.board import _token, command
from thrifty.core.errors import UsageError
from thrifty.dashboard.board_server import BoardServer


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_token_is_kept_for_its_owner_alone(cache):
    token = _token(renewed=False)
    assert _token(renewed=False) == token and len(token) >= 32
    assert (cache / "board-token").stat().st_mode & 0o777 == 0o600
    assert _token(renewed=True) not in (token, "") and _token(renewed=False) != token


def test_a_token_that_others_could_read_is_not_used(cache):
    token = _token(renewed=False)
    (cache / "board-token").chmod(0o644)
    assert _token(renewed=False) != token


def test_it_prints_the_address_and_opens_nothing_unasked(cache, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(BoardServer, "serve_forever", lambda self: None)
    (tmp_path / "runs").mkdir()
    words = ["--runs", str(tmp_path / "runs"), "--port", "0"]
    (line, *_) = CliRunner().invoke(command, [*words, "--no-open"]).stdout.splitlines()
    assert line.startswith("http://127.0.0.1:") and line.endswith(f"/{_token(renewed=False)}/") and not opened
    CliRunner().invoke(command, words)
    assert len(opened) == 1


def test_a_folder_that_is_not_there_is_a_usage_error(cache, tmp_path):
    result = CliRunner().invoke(command, ["--runs", str(tmp_path / "nothing"), "--no-open"])
    assert isinstance(result.exception, UsageError) and "--runs" in result.exception.fix


def test_it_starts_without_torch():
    code = "import sys, thrifty.cli.board, thrifty.dashboard.board_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
