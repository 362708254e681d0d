"""`thrifty doctor`: measure this machine, and report missing software or resources with their fixes."""

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quick", is_flag=True, help="Skip memory and disk; takes about one second.")
@click.option("--compile", "with_compile", is_flag=True, help="Also test torch.compile on a small function.")
@click.option(
    "--sparse",
    multiple=True,
    metavar="OUTxIN",
    help="Also measure the density below which sparse matmuls of a layer of this shape are faster.",
)
def command(as_json: bool, quick: bool, with_compile: bool, sparse: tuple[str, ...]) -> None:
    """Measure the speed of this machine for training, and report missing software and resources.

    The exit code is 1 only if training is impossible. Missing optional packages do not change the exit code.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    shapes = [_shape(text) for text in sparse]
    print_result(thrifty.doctor(quick=quick, compile=with_compile, sparse=shapes), as_json)


def _shape(text: str) -> tuple[int, int]:
    """Return the rows and columns of a weight matrix from text such as 4096x1024."""
    from thrifty.core.errors import UsageError

    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(f"--sparse {text!r} is not a weight shape (outputs x inputs)", fix="--sparse 4096x1024")
    return int(sizes[0]), int(sizes[1])
