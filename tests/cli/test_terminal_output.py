"""Answers without torch, output that fits the terminal, and silent libraries."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from command_line import CommandLine
from rich.console import Group

import thrifty
from thrifty.interface.catalog import Kind
from thrifty.interface.samples import SampledText
from thrifty.reporting.printed_result import PrintedResult, ResultTable, lines, number_table, print_to_terminal

WITHOUT_TORCH = "\n".join(
    [
        "import sys",
        "from thrifty.cli.main import main",
        "try: main(sys.argv[1:])",
        "finally: assert not {'torch', 'numpy'} & sys.modules.keys()",
    ]
)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *(("--help", 0), ("--version", 0), ("train --help", 0), ("train --bogus", 2), ("trian", 2)),
        *((f"list {kind}", 0) for kind in get_args(Kind)),
        *((f"show {name}", 0) for name in ("lora", "gpt-small", "next_token", "a3 --kind design")),
        *(("show lorra", 2), ("list --json", 0), ("show lora --json", 0), ("data list", 0), ("data list --json", 0)),
    ],
)
def test_answers_that_need_no_torch_do_not_import_it(words: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words.split()], capture_output=True, text=True)
    assert done.returncode == code and "AssertionError" not in done.stderr


def test_the_board_starts_without_torch() -> None:
    program = "import sys, thrifty.interface.board; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LONG = "the quick brown fox jumps over the lazy dog " * 3


class Numbers(PrintedResult):
    def __rich__(self) -> Group:
        return lines(LONG, number_table(["design", "cycles", "energy"], [["a" * 30, "1,234,567", "9"]]))


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("result", ["table", "numbers", "list"])
def test_output_wraps_to_the_terminal(result: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, PrintedResult] = {
        "table": ResultTable(("name", "about"), [("x" * 20, LONG)]),
        "numbers": Numbers(),
        "list": thrifty.list(search="lora"),
    }
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    print_to_terminal(shown[result])
    printed = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdout.getvalue())  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width and "…" not in printed
    letters = {"table": "x" * 15, "numbers": "a" * 5, "list": "adapters.lora"}
    assert letters[result] in printed


def test_generated_control_characters_do_not_reach_the_terminal() -> None:
    text = "a\x1b[2Jb\x07\r\n\tc é 你 👍"
    sampled = SampledText("runs/text", "a", text, [1], 0.8, None, 0, 1.0)
    assert str(sampled) == "a\ufffd[2Jb\ufffd\ufffd\n" + " " * 8 + "c é 你 👍"
    assert sampled.as_dict()["text"] == text


NOISY = """
import logging, sys, warnings
import torch
from torch import nn


class Data:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index % 3))}


def build():
    warnings.warn("a warning of a library")
    logging.getLogger("library").warning("a log line of a library")
    return nn.Linear(4, 1)


def loss(model, batch):
    return model(batch["x"])[:, 0].square()
"""


def test_quiet_run_silences_libraries(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    command = CommandLine(tmp_path, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"})
    own = ("--data", "noisy:Data", "--held-out", "noisy:Data", "--loss", "noisy:loss", "--steps", "2", "--batch", "8")
    words = ("train", "--model", "noisy:build", *own)
    assert "a warning of a library" in command(*words).stderr
    done = command(*words, "--quiet")
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "runs" / "run-2" / "summary.json").is_file()
