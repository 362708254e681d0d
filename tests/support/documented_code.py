"""Code blocks of documentation pages, and a folder with the small files that they name."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from chat_runs import sums, write_rows
from command_line import CommandLine
from labelled_texts import reviews, save_model, write_csv

BLOCK = re.compile(
    r"(?:^% not executed: (?P<reason>[^\n]+)\n)?^```(?P<language>bash|python)\n(?P<code>.*?)^```$", re.M | re.S
)
STEPS = ["--budget", "4steps"]
TINY = [*STEPS, "--set", "checkpoints.every=2", "--set", "evaluation.examples=4", "--set", "data.batch=4"]
UNCOMPILED = ["--without", "compile", "--without", "attention.tiled"]
BIDIRECTIONAL = ("masked", "spans")
"""Recipes without tiled attention."""
SIZES = ["--set", "data.vocabulary=300", "--set", "model.width=32", "--set", "model.depth=2", "--set", "model.heads=4"]
FEW_RUNS = ["--seeds", "2", "--rate-trials", "1", "--warmup-steps", "2", "--equal-budget", "steps"]
QUICK_PLAN = ["--no-probe", "--seconds", "20"]


@dataclass(frozen=True)
class CodeBlock:
    language: str
    code: str
    reason: str
    """Reason for which the block is not executed; empty if it is."""


def code_blocks(page: Path) -> list[CodeBlock]:
    """Return the blocks of bash and Python of a page."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [CodeBlock(match["language"], match["code"], match["reason"] or "") for match in found]


def write_files(folder: Path) -> None:
    """Write the files that pages name, and the run "mine"."""
    words = "\n\n".join(f"The cat sat on mat {n} and saw {n * n % 97} dogs near the river." for n in range(600))
    (folder / "my.txt").write_text(words)
    write_csv(folder / "reviews.csv", reviews(80))
    write_rows(folder / "chats.jsonl", sums(60))
    classes = {"id2label": {"0": "negative", "1": "positive"}, "label2id": {"negative": 0, "positive": 1}}
    save_model(folder / "bert-folder", "bert", "AutoModelForSequenceClassification", **classes)
    own = CommandLine(folder)
    own("train", "text", "--data", "my.txt", "--name", "mine", *TINY, *UNCOMPILED, *SIZES, "--set", "data.length=256")
    own("export", "mine", "base-model")


def shortened(words: list[str]) -> list[str]:
    """Shorten a command so that it runs in seconds: few steps, small batches, a small model."""
    if words[1:3] == ["data", "score"]:
        return [*words, "--steps", "4"]
    if words[1:3] in (["plan", "size"], ["plan", "fit"]):
        return words
    if not {"train", "explain", "check", "compare", "plan", "sweep"} & {*words[:5]}:
        return words
    if words[2].endswith(".toml"):
        return [*words, *STEPS]
    kept = [word for i, word in enumerate(words) if word != "--budget" and words[i - 1] != "--budget"]
    if words[2].startswith("vit-"):
        return [*kept, *TINY]
    length = ["--set", f"data.length={256 if 'base-model' in kept else 32}"]
    sizes = [] if "--model" in kept else SIZES
    more = {"compare": FEW_RUNS, "plan": QUICK_PLAN, "sweep": ["--trials", "2"]}.get(words[1], [])
    uncompiled = UNCOMPILED[:2] if words[2] in BIDIRECTIONAL else UNCOMPILED
    return [*kept, *TINY, *uncompiled, *length, *sizes, *more]


def run_page(page: Path, folder: Path) -> None:
    """Execute the blocks of a page in order. Python blocks without a command between them are one script."""
    blocks = [block for block in code_blocks(page) if not block.reason]
    for number, (language, group) in enumerate(groupby(blocks, lambda block: block.language)):
        code = "\n\n".join(block.code for block in group)
        if language == "bash":
            for words in commands(code):
                run_command(words, folder)
        else:
            script = folder / f"block_{number}.py"
            script.write_text(re.sub(r'(?<!_)budget="[^"+]*"', 'budget="4 steps"', code))
            run([sys.executable, script.name], folder)


def commands(code: str) -> Iterator[list[str]]:
    """Yield the commands of a block of bash, one per line."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def run_command(words: list[str], folder: Path) -> None:
    own = CommandLine(folder)
    if words[1] == "resume":  # the run has finished by now: as if it had been cut off after its first checkpoint
        shutil.rmtree(folder / "runs" / words[2] / "checkpoints" / "step-00000004")
    if words[0] == "thrifty":
        own(*shortened(words)[1:], timeout=300)
    elif words[0] == "torchrun":
        assert words[1] == "--nproc-per-node" and words[3:5] == ["-m", "thrifty"], words
        own(*shortened(words[4:])[1:], ranks=int(words[2]))
    else:
        run(words, folder)


def run(words: list[str], folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = CommandLine(folder).variables() | {"PATH": path}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
