"""Four programs train the same language model for equal time: a plain loop, a compiled loop, Trainer, and Thrifty.

    python demo/demo.py [--seconds 40] [--name demo]

Writes runs/NAME: the plan, the curves and a page. Every program has its own process. Its clock starts after its first
step, which may compile, and stops during evaluation.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import altair as alt
from rich.console import Console
from shared import HELD_OUT_EXAMPLES, PROMPT, RECIPE

import thrifty as th
from thrifty.core.recipe import Budget, EvaluationSettings
from thrifty.machine.machine_info import cpu_model
from thrifty.reporting.bar_page import figure, heading, page, paragraph, table
from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.printed_result import number_table
from thrifty.reporting.saved_chart import page_svg

HERE = Path(__file__).parent
PLAIN, COMPILED, TRAINER, PLANNED = "plain PyTorch loop", "compiled loop", "Hugging Face Trainer", "Thrifty's plan"
PROGRAMS = {
    PLAIN: ["plain_loop.py"],
    COMPILED: ["plain_loop.py", "compile"],
    TRAINER: ["hf_trainer.py"],
}


@dataclass(frozen=True)
class Outcome:
    curve: list[tuple[float, float]]
    """Training seconds and held-out loss of each evaluation."""
    steps: int
    text: str

    @property
    def loss(self) -> float:
        return self.curve[-1][1]

    def seconds_to(self, loss: float) -> float | None:
        """Return the training seconds until the held-out loss is at most `loss`, interpolated between evaluations."""
        before = self.curve[0]
        for seconds, value in self.curve:
            if value <= loss:
                share = (before[1] - loss) / (before[1] - value) if value < before[1] else 1.0
                return before[0] + share * (seconds - before[0])
            before = seconds, value
        return None


def plan_of(seconds: float, folder: Path) -> th.RecipePlan:
    """Plan the recipe of the plain loop. Evaluations and budget are as in the other programs."""
    evaluation = EvaluationSettings(every=15, examples=HELD_OUT_EXAMPLES, at_start=False)
    recipe = replace(RECIPE, evaluation=evaluation, budget=Budget(seconds=seconds, counts="training"))
    plan = th.plan(recipe, allow="different", seconds=60, quiet=True)
    plan.write(folder / "plan.toml")
    return plan


def run_program(words: Sequence[str], seconds: float, file: Path) -> Outcome:
    script, *options = words
    subprocess.run([sys.executable, str(HERE / script), f"{seconds:g}", str(file), *options], check=True)
    data = json.loads(file.read_text())
    return Outcome([tuple(point) for point in data["curve"]], data["steps"], data["text"])


def run_planned(folder: Path, name: str) -> Outcome:
    """Train the plan by the command line. The clock starts after the first step, as in the other programs."""
    command = [sys.executable, "-m", "thrifty", "train", str(folder / "plan.toml"), "--name", name, "--quiet"]
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in Path("runs", name, "records.jsonl").read_text().splitlines()]
    seconds = {record["step"]: record["seconds"] for record in records if record["kind"] == "step"}
    first = min(seconds.values())
    curve = [(seconds[r["step"]] - first, r["loss"]) for r in records if r["kind"] == "evaluation"]
    text = th.sample(name, PROMPT, tokens=60, temperature=0.6).text
    return Outcome(curve, len(seconds), text)


def reasons(plan: th.RecipePlan) -> list[str]:
    """Return one line for each technique that the plan adds or takes out."""
    changed = [reason for reason in plan.plan.reasons if reason.verdict not in ("kept", "not taken")]
    return [f"{reason.verdict} {reason.technique}: {reason.why}" for reason in changed]


def rows_of(outcomes: Mapping[str, Outcome], target: float) -> list[list[str]]:
    rows = []
    for name, outcome in outcomes.items():
        seconds, base = outcome.seconds_to(target), outcomes[PLAIN].curve[-1][0]
        reached = "not reached" if seconds is None else f"{seconds:.0f} s"
        gain = "" if seconds is None or name == PLAIN else f"{base / seconds:.1f} times as fast"
        rows.append([name, f"{outcome.steps:,}", f"{outcome.loss:.2f}", reached, gain])
    return rows


def verdict(outcomes: Mapping[str, Outcome], target: float) -> str:
    """Return the result in words, whatever it is."""
    seconds = outcomes[PLANNED].seconds_to(target)
    if seconds is None:
        return f"Thrifty's plan did not reach the plain loop's loss of {target:.2f}."
    gain = outcomes[PLAIN].curve[-1][0] / seconds
    rivals = {name: outcomes[name].seconds_to(target) for name in (COMPILED, TRAINER)}
    against = [
        f"{name} {time / seconds:.1f} times" if time else f"{name} did not reach it" for name, time in rivals.items()
    ]
    return f"Thrifty's plan reached the plain loop's loss {gain:.1f} times as fast ({'; '.join(against)})."


def chart(outcomes: Mapping[str, Outcome]) -> str:
    points = [
        {"program": name, "seconds": seconds, "loss": loss}
        for name, outcome in outcomes.items()
        for seconds, loss in outcome.curve
    ]
    colours = [css_variable(name) for name in ("muted", "held-out", "trained", "train")]
    most = max(outcome.curve[len(outcome.curve) // 5][1] for outcome in outcomes.values())
    lines = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=2.5, clip=True)
    encoded = lines.encode(
        x=alt.X("seconds:Q", title="seconds in training steps"),
        y=alt.Y("loss:Q", title="held-out loss", scale=alt.Scale(zero=False, domainMax=most)),
        color=alt.Color("program:N", title=None, scale=alt.Scale(domain=[*outcomes], range=colours)),
    )
    return page_svg(encoded.properties(width=780, height=340).to_dict())


def write_page(file: Path, outcomes: Mapping[str, Outcome], target: float, plan: th.RecipePlan) -> None:
    columns = ("program", "steps", "held-out loss", f"time to loss {target:.2f}", "")
    body = [
        paragraph(verdict(outcomes, target)),
        figure("Held-out loss", "nats per token", chart(outcomes)),
        table(columns, rows_of(outcomes, target), columns[1:4]),
        heading("The plan"),
        *map(paragraph, reasons(plan)),
        heading("Text"),
        *(paragraph(f"{name}: {outcomes[name].text}") for name in (PLAIN, PLANNED)),
    ]
    file.write_text(page("Four programs, equal time", about(), body), encoding="utf-8")


def about() -> str:
    return f"A Llama-style language model ({RECIPE.model.preset}) on the King James Bible; {cpu_model()}. One run each."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--name", default=f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    arguments = parser.parse_args()
    console, folder = Console(), Path("runs", f"{arguments.name}-programs")
    folder.mkdir(parents=True)
    console.print(about())
    plan = plan_of(arguments.seconds, folder)
    for line in reasons(plan):
        console.print(f"  {line}")
    outcomes = {}
    for name, words in PROGRAMS.items():
        outcomes[name] = run_program(words, arguments.seconds, folder / f"{words[-1]}.json")
        console.print(f"  {name}: loss {outcomes[name].loss:.2f}")
    outcomes[PLANNED] = run_planned(folder, arguments.name)
    target = outcomes[PLAIN].loss
    columns = ("program", "steps", "held-out loss", f"time to loss {target:.2f}", "")
    console.print(number_table(columns, rows_of(outcomes, target)))
    console.print(verdict(outcomes, target))
    for name in (PLAIN, PLANNED):
        console.print(f"\n{name} writes: {outcomes[name].text}")
    write_page(folder / "page.html", outcomes, target, plan)
    console.print(f"\npage: {folder / 'page.html'}")


if __name__ == "__main__":
    main()
