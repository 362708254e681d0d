"""The demo: four programs train the same small GPT on the same text for the same time.

python demo/demo.py [SECONDS]

The loop of PyTorch's tutorials, that loop compiled, and Trainer of Hugging Face are programs of their own in this
folder. The fourth is what `thrifty.plan` chooses for the loop's model and data.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from page import write_page
from rich.console import Console
from rich.table import Table
from shared import BATCH, HELD_OUT, LENGTH, RATE, Clock, build, held_out_loss, prepare, rows

import thrifty as th

HERE = Path(__file__).parent
SECONDS = 40.0
PLANNED = "Thrifty"
PROGRAMS = {
    "PyTorch loop": ("plain_loop.py", "loop"),
    "PyTorch loop, torch.compile": ("plain_loop.py", "compiled"),
    "Hugging Face Trainer": ("hf_trainer.py", "trainer"),
}
"""File and name of each program."""


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    console, folder = Console(highlight=False), new_folder(Path("runs"))
    documents, title = texts()
    prepare(documents, folder)
    parameters = sum(each.numel() for each in build().parameters())
    console.print(
        f"\n[bold]Which program learns fastest?[/bold] A GPT of {parameters / 1e6:.1f}M parameters learns {title}. Each "
        f"program trains for {seconds:g} s on {torch.get_num_threads()} threads, with the same model, text and batch size."
    )
    ended = {}
    for label, (file, name) in PROGRAMS.items():
        arguments = {"loop": [seconds], "compiled": [seconds, "compile"]}.get(name) or [ended["PyTorch loop"]["steps"]]
        with console.status(label):
            ended[label] = run(file, folder, name, arguments)
        console.print(f"  {label:<28} loss {ended[label]['curve'][-1][1]:.2f} after {ended[label]['steps']} steps")
    with console.status("thrifty.plan chooses techniques"):
        plan = choose(folder, seconds)
    console.print(f"\n[bold]thrifty.plan[/bold] timed candidates on this machine and chose:")
    for technique, why in reasons(plan):
        console.print(f"  {technique}: {why}")
    with console.status(PLANNED):
        ended[PLANNED] = train(plan, folder)
    report(console, ended, folder, write_page(ended, folder, reasons(plan)))


def new_folder(runs: Path) -> Path:
    """Return a new folder: demo, demo-2, demo-3, and so on."""
    number = 1
    while (folder := runs / (f"demo-{number}" if number > 1 else "demo")).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def texts() -> tuple[list[str], str]:
    """Return documents and their title: the King James Bible, or without a network this Python's library."""
    try:
        th.datasets.get("kjv", quiet=True)
    except th.ThriftyError:
        files = sorted(Path(json.__file__).parents[1].glob("*.py"))
        return [file.read_text(errors="ignore") for file in files], "the source code of Python's library"
    file = th.datasets.known().as_dict()
    lines = (Path(file["cache"]) / "sets" / "kjv" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines], "the King James Bible"


def run(file: str, folder: Path, name: str, arguments: list) -> dict:
    """Run a program, and return the curve and text that it wrote."""
    command = [sys.executable, HERE / file, folder, *map(str, arguments)]
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return json.loads((folder / f"{name}.json").read_text())


def choose(folder: Path, seconds: float) -> th.RecipePlan:
    """Plan the loop's training, with techniques that change the result too if a comparison found them better."""
    return th.plan(
        model=build,
        data=[{"input_ids": row} for row in rows(folder, "train")],
        held_out=[{"input_ids": row} for row in rows(folder, "held_out")],
        loss="next_token",
        techniques=[th.AdamW(lr=RATE), th.LinearDecay(), th.GradientClipping()],
        batch=BATCH,
        budget=f"{seconds}s",
        settings={"budget.counts": "training", "evaluation.every": 10, "evaluation.examples": HELD_OUT},
        allow="different",
        quiet=True,
    )


def reasons(plan: th.RecipePlan) -> list[tuple[str, str]]:
    """Return the changes of a plan and the reason of each."""
    return [(each["technique"], each["why"]) for each in plan.as_dict()["reasons"] if each["verdict"] == "added"]


def train(plan: th.RecipePlan, folder: Path) -> dict:
    clock = Clock(folder, "thrifty", 0)

    def follow(record: th.Record) -> None:
        clock.steps = record.step
        clock.seconds += record.seconds if record.step > 1 else 0
        if record.held_out_loss is not None:
            clock.add(clock.seconds, record.held_out_loss)

    trained = th.train(recipe=plan.recipe, observers=[follow], name="thrifty", runs=folder, quiet=True)
    clock.save(trained.model)
    return json.loads((folder / "thrifty.json").read_text())


if __name__ == "__main__":
    main()
