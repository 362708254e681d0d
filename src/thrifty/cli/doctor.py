"""`thrifty doctor`: measure this machine, report what is missing and how to install it."""

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quick", is_flag=True, help="Take about one second: skip memory and disk.")
@click.option("--compile", "with_compile", is_flag=True, help="Also test torch.compile on a small function.")
@click.option(
    "--sparse",
    multiple=True,
    metavar="OUTxIN",
    help="Also measure the density below which sparse products of such a layer are faster.",
)
def command(as_json: bool, quick: bool, with_compile: bool, sparse: tuple[str, ...]) -> None:
    """Measure what this machine can do, and report what is missing.

    The exit code is 1 only if training cannot work at all. Missing optional parts do not change it.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    shapes = [_shape(text) for text in sparse]
    print_result(thrifty.doctor(quick=quick, compile=with_compile, sparse=shapes), as_json)


def _shape(text: str) -> tuple[int, int]:
    """Read the rows and columns of a weight, as in 4096x1024."""
    from thrifty.core.errors import UsageError

    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(
            f"--sparse {text!r} is no shape of a weight", fix="outputs and inputs, such as --sparse 4096x1024"
        )
    return int(sizes[0]), int(sizes[1])
