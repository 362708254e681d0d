"""`thrifty data`: list, download and inspect datasets; score and prune training examples."""

import re
from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, read_moment, recipe_options, together
from thrifty.cli.verb_output import print_result
from thrifty.core.errors import UsageError

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
CHOICE = ("keep_fraction", "order", "drop_hardest", "min_class_share")
choice_options = together(
    click.option("--keep-fraction", type=float, help="Fraction of the training examples to keep.  [default: 0.5]"),
    click.option("--order", help="Examples to keep first: hard, easy, auto or random.  [default: hard]"),
    click.option("--drop-hardest", type=float, help="Fraction of the hardest examples to drop first.  [default: 0]"),
    click.option(
        "--min-class-share",
        type=float,
        help="Minimum examples per label, as a fraction of an equal share.  [default: 0.5]",
    ),
)
"""Options that select examples. None means not passed."""


@click.group(name="data")
def command() -> None:
    """List, download and inspect datasets and pretrained models; score and prune training examples."""


@command.command(name="list")
@AS_JSON
def list_sets(as_json: bool) -> None:
    """List the named datasets and models: size, licence, and if they are on this machine."""
    from thrifty.interface.known_sources import known

    print_result(known(), as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@AS_JSON
def get(names: tuple[str, ...], as_json: bool) -> None:
    """Download datasets or models with pip, npm or apt, verify them, and store them in the cache."""
    import thrifty

    print_result(thrifty.datasets.get(*names), as_json)


@command.command()
@click.argument("source")
@click.option("--column", help="Name of the text column.")
@click.option("--size", type=int, help="Height and width of images in pixels.")
@click.option("--tokenizer", help="A tokenizer.json. By default a tokenizer is trained.")
@click.option("--vocabulary", type=int, help="Vocabulary size of the tokenizer to train.")
@click.option("--length", type=int, help="Tokens per example.")
@click.option("--held-out", type=float, help="Fraction of documents for evaluation.")
@click.option(
    "--near-duplicates",
    type=float,
    help="Similarity above which documents are dropped as near-duplicates, such as 0.8.",
)
@click.option("--examples", type=click.IntRange(0), default=3, show_default=True, help="Number of examples to show.")
@click.option(
    "--scores",
    type=click.Path(path_type=Path),
    help="File of scores. Writes a page of likely label errors and extreme scores.",
)
@click.option("--out", type=click.Path(path_type=Path), help="With --scores: path of the page.  [default: SCORES.html]")
@choice_options
@AS_JSON
def look(source: str, examples: int, scores: Path | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Show the content of SOURCE: a file, a folder, a dataset by name, or hub:owner/name.

    Prints counts, document lengths, duplicates, dropped near-duplicates, tokenizer statistics and decoded examples. For
    images, prints labels or captions, and unreadable files. A folder in which most files are images is read as images,
    or as image-caption pairs.

    With --scores, writes a page of likely label errors and of the highest and lowest scores. With --keep-fraction and
    the other selection options, the page also shows the kept examples.
    """
    import thrifty

    choice = {name: options.pop(name) for name in CHOICE}
    if scores is not None:
        _refuse(options, "with --scores", "the source is read with the settings of the scoring")
        print_result(thrifty.datasets.review(scores, source, out=out, **choice), as_json)
    else:
        _refuse({"out": out, **choice}, "without --scores", "it changes only the page of scores")
        try:
            seen = thrifty.datasets.look(source, examples=examples, **options)
        except UsageError as error:  # this command has options in place of --set
            options_in_fix = re.sub(r"--set data\.(\w+)=", lambda name: f"--{name[1].replace('_', '-')} ", error.fix)
            raise UsageError(error.what, fix=options_in_fix) from None
        print_result(seen, as_json)


@command.command()
@click.argument("source")
@click.option("--model", help="Model folder or model name; the preview uses its tokenizer and template.")
@click.option("--tokenizer", help="A tokenizer.json. By default that of --model, or a trained one.")
@click.option("--template", default="", help="Instead of the tokenizer's template: chatml, alpaca or a Jinja file.")
@click.option("--learn-questions", is_flag=True, help="Train on questions and answers, not only on answers.")
@click.option("--length", type=int, default=512, show_default=True, help="Maximum tokens per conversation.")
@click.option(
    "--examples", type=click.IntRange(0), default=3, show_default=True, help="Number of conversations to show."
)
@AS_JSON
def preview(source: str, as_json: bool, **options: Any) -> None:
    """Show which tokens of the conversations in SOURCE have a loss. SOURCE is a table, a folder of tables, or the name
    of a dataset.

    Tokens with a loss are printed between ⟦ and ⟧, and green in a terminal.
    """
    import thrifty

    print_result(thrifty.datasets.preview(source, **options), as_json)


@command.command()
@recipe_options
@click.option("--method", default="el2n", show_default=True, help="Score of an example, see below.")
@click.option("--runs", type=int, help="Number of runs to average, each with another seed.  [default: 5]")
@click.option("--steps", metavar="STEPS|FRACTION", help="Steps of each run, or a fraction of the recipe's steps.")
@click.option("--embed-with", metavar="FOLDER", help="prototype: run or model folder that computes embeddings.")
@click.option("--clusters", type=int, help="prototype: number of k-means clusters.  [default: one per label]")
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: NAME-METHOD.safetensors]")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the written file and its statistics as JSON.")
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
    """Score every training example of RECIPE, and write the scores to a file.

    \b
    el2n        L2 norm of softmax minus one-hot label
    grand       norm of the example's gradient over all parameters
    forgetting  number of times a correct prediction became wrong
    loss        loss of the example
    margin      largest probability of a wrong label minus the probability of the right label
    prototype   cosine distance of the embedding to the nearest k-means center
    random, input_norm   controls

    If your own model was trained in the run of --embed-with, pass its builder function as --model. The same command
    resumes an interrupted scoring.
    """
    import thrifty

    settings: dict[str, Any] = {"runs": runs, "embed_with": embed_with, "clusters": clusters, "out": out}
    if steps is not None:
        settings["steps"] = read_moment("--steps", steps, "--steps 100; or --steps 0.2 for a fraction")
    recipe = build_recipe(**options).recipe()
    print_result(thrifty.datasets.score(recipe, method=method, quiet=quiet, **settings), as_json, quiet)


@command.command()
@click.argument("scores", type=click.Path(path_type=Path))
@choice_options
@click.option("--recipe", help="Name or TOML file of the recipe to prune.  [default: the scored recipe]")
@click.option("--write", type=click.Path(path_type=Path), help="Write the recipe with the selection to this TOML file.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts and the settings as JSON.")
def prune(scores: Path, as_json: bool, **options: Any) -> None:
    """Select training examples by the score file SCORES. Print the number of kept examples per label, and the recipe
    settings.

    No data are deleted: a recipe with these settings trains on the kept examples.
    """
    import thrifty

    print_result(thrifty.datasets.prune(scores, **options), as_json)


def _refuse(options: dict[str, Any], when: str, why: str) -> None:
    """Raise UsageError if an option would have no effect, because ignoring it silently would mislead."""
    from thrifty.core.errors import UsageError

    for option, value in options.items():
        if value is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} has no effect {when}: {why}", fix=f"remove --{name}")
