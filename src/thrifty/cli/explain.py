"""`thrifty explain`: what a recipe will do, stage by stage, before it runs."""

from typing import Any

import click

from thrifty.cli.options import put_together, recipe_options


@click.command()
@recipe_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, **options: Any) -> None:
    """Show what RECIPE will do: each technique in order of stage, what it touches, memory and work before and after
    it, what is refused and why, and where every value that is not a default came from. Nothing is trained."""
    from thrifty.cli.telling import print_json

    layers = put_together(**options)
    found = explained(layers)
    if as_json:
        print_json(found)
        return
    _tell(found)


def explained(layers: Any) -> dict[str, Any]:
    """The explanation of a recipe as plain data; a technique that refuses is named, the others are explained."""
    from dataclasses import replace

    from thrifty.core.errors import Refused
    from thrifty.core.explain import explain, touched
    from thrifty.preparing import prepare

    recipe = layers.recipe()
    prepared = prepare(recipe, steps=recipe.budget.steps or 1000)
    run, refused = prepared.run, {}
    while True:
        try:
            notes = touched(run)
            break
        except Refused as reason:
            name = reason.what.partition(":")[0]
            if name not in (technique.name for technique in run.techniques):
                raise  # the model itself is refused
            refused[name] = str(reason)
            run = replace(run, techniques=tuple(t for t in run.techniques if t.name != name), notes={})
    return {
        "recipe": recipe.name,
        "data": {
            "train_tokens": prepared.data.train_tokens,
            "held_out_tokens": prepared.data.held_out_tokens,
            "vocabulary": prepared.data.vocabulary,
            "unigram_entropy": prepared.data.unigram_entropy,
        },
        **explain(run).as_dict(notes),
        "refused": refused,
        "origins": layers.changed(),
    }


def _tell(found: dict[str, Any]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    data = found["data"]
    console.print(
        f"{found['recipe']}: {found['parameters']:,} parameters, {data['train_tokens']:,} training tokens, "
        f"vocabulary {data['vocabulary']:,}, unigram entropy {data['unigram_entropy']:.3f} nats/token\n"
    )
    table = Table(
        "stage", "technique", "numerics", "touched", "memory", "activations", "GFLOP", box=None, pad_edge=False
    )
    plain = found["plain"]
    table.add_row("", "plain run", "", "", _bytes(plain["memory"]), _bytes(plain["activations"]), _giga(plain["flops"]))
    for row in found["techniques"]:
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
    total = found["footprint"]
    parts = ", ".join(
        f"{name} {_bytes(total[name])}" for name in ("parameters", "buffers", "gradients", "optimizer", "activations")
    )
    console.print(f"\npredicted peak {_bytes(total['memory'])}: {parts}, temporary {_bytes(total['temporary'])}")
    if found["decisions"]:
        console.print("\ndecided when the first batch is seen")
    for decision in found["decisions"]:
        console.print(f"  {decision}", markup=False)
    for name, reason in found["refused"].items():
        console.print(f"refused {name}: {reason.partition(': ')[2]}", markup=False)
    console.print("\nvalues that are not defaults")
    for path, origin in found["origins"].items():
        console.print(f"  {path}  from {origin}", markup=False)


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def _giga(value: float) -> str:
    return f"{value / 1e9:,.1f}"
