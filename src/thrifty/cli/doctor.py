"""`thrifty doctor`: what this machine can do for training, what is missing, and what to do about it."""

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quick", is_flag=True, help="About one second: memory and disk are not measured.")
@click.option("--compile", "with_compile", is_flag=True, help="Also compile a small function, to see that it works.")
@click.option(
    "--sparse", multiple=True, metavar="OUTxIN", help="Also from which density on products of such a layer pay sparse."
)
def command(as_json: bool, quick: bool, with_compile: bool, sparse: tuple[str, ...]) -> None:
    """What this machine can do, measured, and what is missing.

    Exit code 1 only where training cannot work at all; 0 otherwise, whatever optional part is missing.
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
            f"--sparse {text} is no shape of a weight", fix="outputs and inputs, such as --sparse 4096x1024"
        )
    return int(sizes[0]), int(sizes[1])
