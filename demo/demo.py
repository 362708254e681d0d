"""The demo: four programs train the same small GPT on the same text for the same time.

    python demo/demo.py [SECONDS]

The loop of PyTorch's tutorials, that loop compiled, and Trainer of Hugging Face are programs of their own in this
folder. The fourth is what `thrifty.plan` chooses for the same module and text.
"""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from page import write_page
from rich.console import Console
from shared import BATCH, DEVICE, LENGTH, RATE, STEPS_PER_EVALUATION, Clock, build, prepare

import thrifty as th
from thrifty.reporting.run_tables import TextTable
from thrifty.training.run_environment import environment

HERE = Path(__file__).parent
SECONDS = 40.0
PLANNED = "Thrifty"
COLUMNS = ("Program", "Steps", "First step", "Held-out loss", f"{PLANNED} reached it in")
BASELINES = (
    "The first three use float32 and AdamW at a tuned rate. The loss is of held-out text, in nats per token. Times are "
    "seconds of training steps after the first."
)
Programs = dict[str, dict[str, Any]]
"""Results by program: number of steps, seconds of the first step, curve of (seconds, loss), and text."""


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    console, folder = Console(highlight=False, soft_wrap=True), new_folder(Path("runs"))
    documents, title, prompt = texts()
    prepare(documents, prompt, folder)
    parameters = sum(each.numel() for each in build().parameters())
    machine = "this GPU" if DEVICE == "cuda" else f"{torch.get_num_threads()} cores of this machine"
    about = (
        f"Four programs train the same GPT ({parameters / 1e6:.1f}M parameters) on {title}, for {seconds:g} s each on "
        f"{machine}. Which one learns fastest?"
    )
    console.print(f"[bold]{wrapped(about)}[/bold]")
    console.print(wrapped(BASELINES) + "\n")
    programs: Programs = {}
    for label, file, arguments in (
        ("PyTorch loop", "plain_loop.py", [seconds]),
        ("PyTorch loop, torch.compile", "plain_loop.py", [seconds, "compile"]),
        ("Hugging Face Trainer", "hf_trainer.py", [seconds]),
    ):
        with console.status(f"{label}: {seconds:g} s"):
            programs[label] = run(folder, file, *arguments)
        console.print(f"  {label:<28} loss {last_loss(programs[label]):.2f} after {programs[label]['steps']} steps")
    began = time.perf_counter()
    with console.status("thrifty.plan times candidates on this machine"):
        plan = choose(folder, seconds)
    took = time.perf_counter() - began
    console.print(f"\nthrifty.plan chose, for the same module and text, in {took:.0f} s that are not counted below:")
    chosen = reasons(plan)
    for technique, why in chosen.items():
        parts = [part for part in why.split("; ") if not part.startswith(("alone", "proven"))]
        console.print(wrapped(f"{technique}: {'; '.join(parts)}", "  "))
    if not chosen:
        console.print(wrapped("no technique in addition to the recipe", "  "))
    with console.status(f"{PLANNED}: {seconds:g} s"):
        programs[PLANNED] = train(plan, folder)
    table, verdict = TextTable("Programs", COLUMNS, rows(programs), frozenset(range(1, 5))), in_words(programs)
    console.print(f"\n{in_columns(table)}\n\n[bold]{wrapped(verdict)}[/bold]\n")
    console.print(wrapped(f"Text of the planned model: {programs[PLANNED]['text']}") + "\n")
    (folder / "demo.json").write_text(json.dumps(values(programs, chosen, took)), encoding="utf-8")
    page = write_page(folder, about, verdict, is_faster(programs), table, programs, chosen)
    console.print(f"Page with all curves   {page}")
    console.print("Your own text          thrifty train --data my.txt --budget 5min")
    console.print("Your own module        docs/own_model.md")
    open_in_browser(page)


def values(programs: Programs, reasons: dict[str, str], planning: float) -> dict[str, Any]:
    """Return all measured values as plain data, with machine and versions."""
    return {
        "benchmark": "demo: time to equal quality",
        "command": f"make demo SECONDS={programs['PyTorch loop']['curve'][-1][0]:.0f}",
        "seconds of planning": planning,
        "chosen": reasons,
        "programs": programs,
        "environment": environment(DEVICE),
    }


def new_folder(runs: Path) -> Path:
    """Return a new folder: demo, demo-2, demo-3, and so on."""
    number = 1
    while (folder := runs / (f"demo-{number}" if number > 1 else "demo")).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def texts() -> tuple[list[str], str, str]:
    """Return documents, their title and a prompt: the King James Bible, or without a network Python's reference."""
    try:
        cache = Path(th.datasets.get("kjv", quiet=True).as_dict()["cache"])
    except th.ThriftyError:
        from pydoc_data.topics import topics

        return [*topics.values()], "Python's language reference", "The statement"
    lines = (cache / "sets" / "kjv" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines], "the King James Bible", "And it came to pass"


def run(folder: Path, file: str, *arguments: object) -> dict[str, Any]:
    """Run a program of this folder in a process, and return its result."""
    command = [sys.executable, str(HERE / file), str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def choose(folder: Path, seconds: float) -> th.RecipePlan:
    """Plan the training of the loop's module and text. Techniques that change the result are allowed; the plan takes
    them if a comparison found them better."""
    return th.plan(
        model=build,
        data=folder / "train.jsonl",
        techniques=[th.AdamW(lr=RATE), th.LinearDecay(), th.GradientClipping()],
        batch=BATCH,
        budget=f"{seconds}s",
        settings={
            "budget.counts": "training",
            "data.length": LENGTH,
            "data.tokenizer": str(folder / "tokenizer.json"),
            "data.held_out": 0.02,
            "evaluation.every": STEPS_PER_EVALUATION,
            "evaluation.examples": BATCH,
        },
        allow="different",
        quiet=True,
    )


def reasons(plan: th.RecipePlan) -> dict[str, str]:
    """Return the reason for each technique that the plan added."""
    return {each["technique"]: each["why"] for each in plan.as_dict()["techniques"] if each["verdict"] == "added"}


def train(plan: th.RecipePlan, folder: Path) -> dict[str, Any]:
    """Train the planned recipe. Its curve has the same held-out loss as those of the other programs."""
    clock = Clock(folder)

    def follow(record: th.Record) -> None:
        clock.count(time.perf_counter() - clock.since if record.step == 1 else record.seconds)
        if record.held_out_loss is not None:
            clock.evaluate(record.model)

    trained = th.train(recipe=plan.recipe, observers=[follow], name="thrifty", runs=folder, quiet=True)
    return clock.result(trained.model)


def last_loss(program: dict[str, Any]) -> float:
    return program["curve"][-1][1]


def seconds_to(program: dict[str, Any], loss: float) -> float | None:
    """Return the seconds after which an evaluation of a program had this loss or a lower one."""
    return next((seconds for seconds, value in program["curve"] if value <= loss), None)


def rows(programs: Programs) -> list[list[str]]:
    """Return a row per program: steps, seconds of the first step, final loss, and Thrifty's time to this loss."""
    table = []
    for label, each in programs.items():
        reached = seconds_to(programs[PLANNED], last_loss(each))
        time = each["curve"][-1][0]
        faster = "not reached" if reached is None else f"{reached:.0f} s instead of {time:.0f} s: {time / reached:.1f}x"
        loss, first = f"{last_loss(each):.2f}", f"{each['first']:.1f} s"
        table.append([label, str(each["steps"]), first, loss, "" if label == PLANNED else faster])
    return table


def in_words(programs: Programs) -> str:
    """Return the verdict: how much sooner Thrifty reached the final loss of each other program."""
    factors, reached, missed = [], [], []
    for label, each in programs.items():
        seconds, whole = seconds_to(programs[PLANNED], last_loss(each)), each["curve"][-1][0]
        if label == PLANNED:
            continue
        if seconds is None:
            missed.append(label)
        else:
            factors.append(whole / seconds)
            reached.append(f"of {label} after {seconds:.0f} s instead of {whole:.0f} s")
    if not factors:
        return f"{PLANNED} did not reach the loss of any other program on this machine"
    low, high = f"{min(factors):.1f}", f"{max(factors):.1f}"
    also = f"; it did not reach that of {' and '.join(missed)}" if missed else ""
    span = low if low == high else f"{low} to {high}"
    return f"Equal quality {span} times as fast: {PLANNED} reached the final loss {', '.join(reached)}{also}"


def is_faster(programs: Programs) -> bool:
    """Return True if Thrifty reached the final loss of each other program in less time."""
    others = [each for label, each in programs.items() if label != PLANNED]
    times = [(seconds_to(programs[PLANNED], last_loss(each)), each["curve"][-1][0]) for each in others]
    return all(seconds is not None and seconds < whole for seconds, whole in times)


def in_columns(table: TextTable) -> str:
    """Return a table as text with aligned columns."""
    lines = [list(table.columns), *map(list, table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent + "  " * bool(indent))


def open_in_browser(page: Path) -> None:
    """Open the page if somebody watches."""
    if sys.stdout.isatty() and (os.environ.get("DISPLAY") or sys.platform == "darwin"):
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


if __name__ == "__main__":
    main()
