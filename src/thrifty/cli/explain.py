"""`thrifty explain`: what a recipe will do, stage by stage, before it runs."""

import sys
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import open_table, print_result, wide_console


@click.command()
@recipe_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, **options: Any) -> None:
    """Show what RECIPE will do: each technique in order of stage, what it touches, memory and work before and after
    it, what is refused and why, and where every value that is not a default came from. Nothing is trained.

    With a mesh, such as --mesh tensor=2,replicate=2, it is what each rank will hold, compute and send; no ranks are
    started. The exit code is 2 where a technique is refused."""
    facts = explain_recipe(build_recipe(**options))
    print_result(facts, lambda: _tell(facts), as_json)
    if facts["refused"]:
        sys.exit(2)


def explain_recipe(layers: Any) -> dict[str, Any]:
    """The explanation of a recipe as plain data; a technique that refuses is named, the others are explained."""
    from thrifty.composition.explain import explain, resident_bytes, touched_modules
    from thrifty.distributed.fake_ranks import fake_rank, ranks_of_stages
    from thrifty.training.memory_meter import MemoryMeter
    from thrifty.training.run_setup import mesh_sizes, prepare_run

    recipe = layers.recipe()
    prepared = prepare_run(recipe, steps=recipe.budget.steps or 1000)
    run, refused, places = prepared.run, {}, {}
    if (count := recipe.mesh.least_ranks) > 1:
        sizes, stages = mesh_sizes(recipe, count), []
        for ranks in ranks_of_stages(sizes):
            with fake_rank(ranks[0], sizes):
                run, also_refused, stage = _without_refused(run, resident_bytes)
            refused |= also_refused
            stages.append({"ranks": [*ranks], **vars(stage)})
        with fake_rank(0, sizes):
            explanation = explain(run)
        notes, places = stages[0]["notes"], {"mesh": sizes, "stages": stages}
    else:
        run, refused, notes = _without_refused(run, touched_modules)
        explanation = explain(run)
    return {
        "recipe": recipe.name,
        "data": prepared.data.description(),
        **explanation.as_dict(notes),
        **places,
        "process": MemoryMeter(run.device).process,
        "refused": refused,
        "origins": layers.changed(),
    }


def _without_refused(run: Any, look: Any) -> tuple[Any, dict[str, str], Any]:
    """What is left of a run when techniques that refuse its model are left out, their reasons, and what `look` then
    finds. Raises RefusedError where the model itself is."""
    from dataclasses import replace

    from thrifty.core.errors import RefusedError

    refused: dict[str, str] = {}
    while True:
        try:
            return run, refused, look(run)
        except RefusedError as reason:
            name = reason.what.partition(":")[0]
            if name not in (technique.name for technique in run.techniques):
                raise
            refused[name] = str(reason)
            run = replace(run, techniques=tuple(t for t in run.techniques if t.name != name), notes={})


def _tell(facts: dict[str, Any]) -> None:
    console = wide_console()
    console.print(f"{facts['recipe']}: {facts['parameters']:,} parameters, {_in_words(facts['data'])}\n")
    for name, reason in facts["refused"].items():
        console.print(f"refused {name}: {reason.partition(': ')[2]}", markup=False)
    table = open_table("stage", "technique", "numerics", "touched", "memory", "activations", "GFLOP")
    plain = facts["plain"]
    table.add_row("", "plain run", "", "", _bytes(plain["memory"]), _bytes(plain["activations"]), _giga(plain["flops"]))
    for row in facts["techniques"]:
        after = row["after"]
        table.add_row(
            row["stage"],
            row["name"],
            row["numerics"],
            "; ".join(row["touched"]),
            _bytes(after["memory"]),
            _bytes(after["activations"]),
            _giga(after["flops"]),
        )
    console.print(table)
    total = facts["footprint"]
    parts = ", ".join(
        f"{name} {_bytes(total[name])}" for name in ("parameters", "buffers", "gradients", "optimizer", "activations")
    )
    console.print(f"\npredicted peak {_bytes(total['memory'])}: {parts}, temporary {_bytes(total['temporary'])}")
    if process := facts["process"]:
        whole = _bytes(total["memory"] + process)
        before = f"it holds {_bytes(process)} before it builds the model, and memory that steps free may stay"
        console.print(f"with the process at least {whole}: {before}")
    if "mesh" in facts:
        _tell_ranks(console, facts)
    if facts["decisions"]:
        console.print("\ndecided when the first batch is seen")
    for decision in facts["decisions"]:
        console.print(f"  {decision}", markup=False)
    console.print("\nvalues that are not defaults")
    for path, origin in facts["origins"].items():
        console.print(f"  {path}  from {origin}", markup=False)


def _in_words(data: dict[str, Any]) -> str:
    if "train_images" in data:
        side, channels = data["side"], data["channels"]
        left_out = f", {data['left_out']:,} files left out" if data["left_out"] else ""
        images = f"{data['train_images']:,} training images of {side} x {side} x {channels}"
        if "train_captions" in data:
            return f"{images} with {data['train_captions']:,} captions, vocabulary {data['vocabulary']:,}{left_out}"
        if data["label_entropy"] is None:
            return f"{images}{left_out}"
        labels = f"{len(data['labels'])} labels, entropy of their frequencies {data['label_entropy']:.3f} nats"
        return f"{images}, {labels}{left_out}"
    return (
        f"{data['train_tokens']:,} training tokens, vocabulary {data['vocabulary']:,}, "
        f"unigram entropy {data['unigram_entropy']:.3f} nats/token"
    )


def _tell_ranks(console: Any, facts: dict[str, Any]) -> None:
    along = " x ".join(f"{axis} {size}" for axis, size in facts["mesh"].items() if size > 1)
    console.print(f"\neach of the ranks of {along} sends {_bytes(facts['footprint']['traffic'])} a step, and keeps")
    for stage in facts["stages"]:
        first, last = stage["ranks"][0], stage["ranks"][-1]
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        kept = ", ".join(f"{name} {_bytes(stage[name])}" for name in ("parameters", "gradients", "optimizer"))
        console.print(f"  {ranks}: {kept}")


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def _giga(value: float) -> str:
    return f"{value / 1e9:,.1f}"
