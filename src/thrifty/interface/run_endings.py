"""Summary of a finished run in a few lines: status, results, folder."""

import math
import os
import shlex
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thrifty.core.errors import for_reader, spelled
from thrifty.core.plain_values import write_size
from thrifty.core.recipe import Budget, Recipe
from thrifty.reporting.key_figures import batch_advice, key_figures
from thrifty.reporting.number_format import significant
from thrifty.reporting.run_record import read_run
from thrifty.training.checkpoint_index import named_steps
from thrifty.training.rendezvous import connect

LEARNED = {0.0: "nothing", 0.05: "almost nothing", 0.25: "little"}
"""Words for what a model has learned, by the maximum gain in nats per token or label."""
WORSE = 1.01
"""Ratio of the last to the best held-out loss above which the end names the best loss."""


def ending(summary: Mapping[str, Any]) -> list[str]:
    """Return the printed lines for a run summary."""
    loss, unigram = summary.get("held_out_loss"), summary.get("unigram_entropy")
    seconds, used = summary.get("budget_seconds"), summary.get("used_seconds")
    budget = f", used {_amount(used)} of {_amount(seconds)} s" if seconds and used is not None else ""
    budget += f"; {summary['stopped_early']}" if "stopped_early" in summary else ""
    measured = "".join(f", {name} {significant(value, 4)}" for name, value in summary.get("held_out", {}).items())
    if measured and "judged_examples" in summary:
        unit = summary.get("unit", "examples")
        measured += f" (of {summary['judged_examples']:,} {unit if unit in ('texts', 'images') else 'examples'})"
    evaluated = summary.get("evaluated_step", summary["steps"])
    held_out = "held-out loss" + (f" after step {evaluated:,}" if evaluated not in (None, summary["steps"]) else "")
    printed = [f"{summary['status']} after {summary['steps']:,} steps, {summary['seconds']:.0f} s of training{budget}"]
    if loss is not None and unigram is not None:
        size = summary["bytes_per_token"]
        bits = f" ({loss / math.log(2) / size:.2f} bits/byte)" if size else ""
        printed.append(f"{held_out} {loss:.3f} nats/token{bits}; unigram entropy {unigram:.3f} nats/token")
        if summary.get("held_out_loss_at_start") is not None:
            printed.append(f"held-out loss before the first step {summary['held_out_loss_at_start']:.3f} nats/token")
    if loss is not None and summary.get("label_entropy") is not None:
        frequencies = f"label frequencies alone {summary['label_entropy']:.3f}"
        printed.append(f"{held_out} {loss:.3f} nats{measured}; {frequencies}")
    elif loss is not None and unigram is None:
        unit = f", {summary['loss_in']}" if "loss_in" in summary else " nats"
        printed.append(f"{held_out} {loss:.3f}{unit}{measured}")
    printed += reached(summary)
    if best := _best_checkpoint(summary):
        printed.append(best)
    if summary.get("peak_memory") and summary.get("predicted_memory"):
        process, kept = (summary.get(f"{name}_memory", 0.0) for name in ("process", "kept"))
        measured = write_size(process + summary["peak_memory"])
        predicted = write_size(process + summary["predicted_memory"] + kept)
        printed.append(f"memory at the peak {measured}, predicted {predicted}")
    if "unrepeatable" in summary:
        printed.append(summary["unrepeatable"])
    printed += [f"caution: {caution}" for caution in summary.get("cautions", ())]
    if advice := _batch_advice(Path(summary["folder"])):
        printed.append(advice)
    if summary["status"] == "interrupted":
        printed.append(f"resume by: {summary['resume']}")
    return [*printed, f"run folder {summary['folder']}"]


def _best_checkpoint(summary: Mapping[str, Any]) -> str:
    """Return how to export the best checkpoint, if the last one is not the best."""
    folder = summary["folder"]
    best = named_steps(Path(folder) / "checkpoints").get("best")
    if best is None or best == summary["steps"]:
        return ""
    fix = spelled(
        f"thrifty export {shlex.quote(folder)} my-model --checkpoint best",
        f"thrifty.export({folder!r}, 'my-model', checkpoint='best')",
    )
    return f"the best checkpoint is of step {best:,}: {fix}"


def _amount(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def reached(summary: Mapping[str, Any]) -> list[str]:
    """Return the result of a run in words: compared with frequencies, with the start, and with the best evaluation."""
    loss, start, best = (
        summary.get(f"{name}") for name in ("held_out_loss", "held_out_loss_at_start", "best_held_out_loss")
    )
    words = []
    for entropy, source, frequencies in (
        (summary.get("unigram_entropy"), "context", "token frequencies"),
        (summary.get("label_entropy"), "the examples", "label frequencies"),
    ):
        if loss is not None and entropy is not None:
            gain = entropy - loss
            how = next((how for most, how in LEARNED.items() if gain <= most), "")
            learned = f"learned {how} from {source} yet" if how else f"learned from {source}"
            words.append(f"{learned}: perplexity {_perplexity(loss)}, {frequencies} alone {_perplexity(entropy)}")
    if loss is not None and start is not None:
        words.append(f"{'better' if loss < start else 'not better'} than before the first step")
    is_judged_by_loss = summary.get("judge", "loss") == "loss"
    if loss is not None and best is not None and loss > WORSE * best and is_judged_by_loss:
        fix = "lower the learning rate" if "stopped_early" in summary else f"stop early ({for_reader('--patience 3')})"
        words.append(f"the best held-out loss was {best:.3f}, before the end: use more data, or {fix}")
    return words


def _perplexity(loss: float) -> str:
    return significant(math.exp(min(loss, 700.0)))


def next_commands(summary: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return three commands, or Python calls, that use a finished run."""
    folder, objective = summary["folder"], recipe.objective.name
    path = shlex.quote(folder)
    use = {
        "next_token": spelled(f"thrifty sample {path} --tokens 200", f"thrifty.sample({folder!r}, tokens=200)"),
        "chat_answers": spelled(f"thrifty chat {path}", f"thrifty.chat({folder!r})"),
        "contrastive": spelled(f"thrifty retrieve {path}", f"thrifty.retrieve({folder!r})"),
    }.get("" if recipe.python.loss or recipe.model.build else objective, "")
    if summary.get("label_entropy") is not None or objective == "regression":
        example = {"texts": "a text", "words": "some words"}.get(summary.get("unit", ""), "image.png")
        use = spelled(f'thrifty predict {path} "{example}"', f"thrifty.predict({folder!r}, [{example!r}])")
    report = spelled(f"thrifty report {path} --open", f"thrifty.report({folder!r})")
    again = "" if "stopped_early" in summary else recipe.resume_line(folder, budget=_same_again(recipe.budget))
    best = ("", "") if _best_checkpoint(summary) == "" else (" --checkpoint best", ", checkpoint='best'")
    build = recipe.model.build
    passed = "…" if recipe.model.weights else str(build).rpartition(":")[2]
    own = (f" --model {build}", f", model={passed}") if build else ("", "")
    export = spelled(
        f"thrifty export {path} my-model{best[0]}{own[0]}", f"thrifty.export({folder!r}, 'my-model'{best[1]}{own[1]})"
    )
    board = spelled("thrifty board", "thrifty.board()")
    return [each for each in (use, report, again, export, board) if each][:3]


def _same_again(budget: Budget) -> str:
    """Return an extension that doubles a budget."""
    if budget.epochs is not None:
        return f"+{budget.epochs:g}epochs"
    units = {"steps": "steps", "tokens": "tokens", "seconds": "s"}
    amounts = {unit: getattr(budget, name) for name, unit in units.items()}
    return next(f"+{max(1, round(amount))}{unit}" for unit, amount in amounts.items() if amount is not None)


def _batch_advice(folder: Path) -> str | None:
    """Return a sentence with the batch size above which larger batches save few steps, if the run measured it."""
    if "measure.noise_scale" not in (folder / "recipe.toml").read_text(encoding="utf-8"):
        return None  # reading the records of a long run is slow
    return batch_advice(key_figures(read_run(folder)))


def is_first_to_report() -> bool:
    """Return True on the first rank of this machine that calls the function. This rank reports an error that
    occurred on all ranks before they have a process group.

    A fixed rank might report too late, because torchrun kills all ranks when one rank exits.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ.get("LOCAL_RANK", "0") == "0"
    start = f"{socket.gethostname()}/{os.getppid()}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    with suppress(RuntimeError):
        return connect(host=False).add(f"thrifty/told/{start}", 1) == 1
    return True
