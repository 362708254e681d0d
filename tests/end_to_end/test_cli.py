"""The command line for persons and scripts."""

import json
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from command_line import CommandLine, assert_equal

from thrifty.cli.chat import _questions
from thrifty.cli.verb_list import VERBS


@pytest.fixture(scope="session")
def trained(common_folder: Path) -> tuple[CommandLine, dict[str, Any]]:
    """Return a command line with a finished run `done`, and the summary that `train --json` printed."""
    thrifty = CommandLine(common_folder)
    return thrifty, thrifty.train("done", steps=4)


def test_help_imports_no_large_package(thrifty: CommandLine) -> None:
    assert "Trained models" in thrifty("--help").stdout
    program = "import sys, thrifty.cli.main as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\n"
    program += "print(sorted({'torch', 'numpy', 'rich', 'transformers'} & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], env=thrifty.variables(), capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_every_command_is_listed_and_has_an_example(thrifty: CommandLine) -> None:
    shown = thrifty("--help").stdout
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", shown, re.MULTILINE)
        help = thrifty(verb, "--help").stdout
        assert f"Usage: thrifty {verb}" in help and "Example: thrifty" in help
    assert "did you mean 'train'" in thrifty("trian", exit_code=2).stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "recipes"),
        ("list", "presets"),
        ("list", "objectives"),
        ("show", "adapters.lora"),
        pytest.param(("doctor", "--quick"), marks=pytest.mark.slow),
        ("data", "list"),
        ("report", "runs/done"),
        ("sample", "runs/done", "--tokens", "4"),
        ("export", "runs/done", "exported"),
    ],
    ids=" ".join,
)
def test_json_output_is_a_single_document(trained: tuple[CommandLine, dict[str, Any]], words: tuple[str, ...]) -> None:
    assert trained[0].json(*words)


def test_json_is_on_stdout_and_progress_on_stderr(
    trained: tuple[CommandLine, dict[str, Any]],
) -> None:
    thrifty, summary = trained
    assert summary["status"] == "finished" and summary["steps"] == 4
    assert summary == json.loads((thrifty.run("done") / "summary.json").read_text())
    words = [word for word in thrifty.recipe("other")[1:] if word != "--quiet"]
    explained = thrifty.json("explain", *words)
    assert explained["refused"] == {} and explained["origins"]["budget.steps"] == "--budget"


@pytest.mark.slow
def test_a_new_python_process_trains_like_a_forked_one(thrifty: CommandLine) -> None:
    """The other tests start the same command as a person."""
    fresh = CommandLine(thrifty.folder, fresh=True)
    outputs = [shell(*fresh.recipe(name)) for name, shell in (("own", fresh), ("fork", thrifty))]
    assert_equal(thrifty.tensors("fork"), thrifty.tensors("own"))
    # durations and the size of a process before it builds the model differ between runs
    own, fork = (re.sub(r"\d+ (?=s of training|MB)", "some ", each.stdout) for each in outputs)
    assert "some s of training" in fork and "some MB" in fork and own.replace("runs/own", "runs/fork") == fork
    commands, environments = [], []
    for name in ("own", "fork"):
        environment = json.loads((thrifty.run(name) / "environment.json").read_text())
        commands.append([word.replace(name, "run") for word in environment.pop("command")])
        environments.append({key: value for key, value in environment.items() if key != "started"})
    assert environments[0] == environments[1] and commands[0] == commands[1]
    for shell in (fresh, thrifty):
        assert "did you mean" in shell("train", "--with", "optimizers.lyon", exit_code=2).stderr


def test_plain_lines_without_a_terminal(thrifty: CommandLine) -> None:
    done = thrifty(*thrifty.recipe("run"))
    assert "\x1b" not in done.stderr + done.stdout
    lines = done.stderr.splitlines()
    assert [line for line in lines if re.match(r"0:00 left · step 6/6 · loss \d+\.\d+ · .* tokens/s · ", line)]
    assert [line for line in lines if re.match(r"first step after [\d.]+ s: ", line)]
    assert "finished after 6 steps" in done.stdout and "unigram entropy" in done.stdout


def test_an_unwritable_file_is_named_without_a_traceback(thrifty: CommandLine) -> None:
    (thrifty.folder / "runs").touch()
    message = thrifty(*thrifty.recipe("run"), exit_code=2).stderr
    assert "runs/run: Not a directory\n  fix: check the path" in message and "Traceback" not in message


def test_full_or_closed_streams_raise_no_traceback(thrifty: CommandLine) -> None:
    with open("/dev/full", "w") as full:
        message = thrifty("list", exit_code=2, stdout=full.fileno()).stderr
    assert "standard output: No space left on device\n  fix: free some space" in message and "Traceback" not in message
    with patch("sys.stdin", None):
        assert list(_questions()) == []


def test_quiet_prints_nothing_even_while_preparing_data(thrifty: CommandLine, tmp_path: Path) -> None:
    thrifty.environment["THRIFTY_CACHE"] = str(tmp_path / "cache")
    done = thrifty(*thrifty.recipe("run", "--quiet"))
    assert (done.stdout, done.stderr) == ("", "")


def test_a_terminal_shows_one_live_line(thrifty: CommandLine) -> None:
    mine, theirs = pty.openpty()
    process = thrifty.start(*thrifty.recipe("run", steps=60), stderr=theirs, stdout=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(mine, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(mine)
    assert process.wait(30) == 0
    text = shown.decode()
    live = [line for line in text.split("\n") if re.search(r" left.*step \d+/60 · loss", line)]
    assert len(live) == 1 and "step 60/60" in live[0]  # overwritten in place, any number of times
    assert "opening the data" in text and "\x1b[?25l" in text
    assert "held-out" in text and "finished after 60 steps" in text
    assert "\nsample\r\n" in text and "  thrifty resume runs/run --budget +60steps" in text


NO_NETWORK = """
    import socket

    def refuse(self, address, *rest):
        with open({log!r}, "a") as file:
            file.write(f"{{address}}\\n")
        raise OSError("the network is forbidden here")

    socket.socket.connect = socket.socket.connect_ex = socket.socket.bind = refuse
    socket.getaddrinfo = lambda *rest, **options: refuse(None, rest)
"""


@pytest.mark.slow
def test_only_a_hub_data_set_opens_a_connection(thrifty: CommandLine) -> None:
    site, log = thrifty.folder / "site", thrifty.folder / "addresses.txt"
    site.mkdir()
    (site / "sitecustomize.py").write_text(textwrap.dedent(NO_NETWORK).format(log=str(log)))
    thrifty.fresh = True
    thrifty.environment["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    assert thrifty.train("run", steps=4)["status"] == "finished"
    thrifty("report", "run")
    thrifty("sample", "run", "--tokens", "3")
    assert not log.exists(), log.read_text()
    probe = [sys.executable, "-c", "import socket; socket.create_connection(('127.0.0.1', 9))"]
    assert subprocess.run(probe, env=thrifty.variables(), capture_output=True).returncode and log.exists()
