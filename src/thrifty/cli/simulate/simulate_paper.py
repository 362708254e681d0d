"""`thrifty simulate paper`: what was published about accelerators beside what is simulated here."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--page", type=click.Path(path_type=Path), help="Write all of it as one offline page too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def paper(page: Path | None, as_json: bool) -> None:
    """Published figures of accelerators, ours beside each, how far off it is and why. Figures from memory are left
    out."""
    from thrifty.cli.simulate.simulate_output import print_table
    from thrifty.cli.simulate.simulate_paper_page import write_page
    from thrifty.cli.verb_output import print_json
    from thrifty.simulators.accelerator.published_claims import claims

    rows = []
    for claim in claims():
        ours = claim.simulate()
        rows.append(vars(claim) | {"simulated": ours, "off": ours / claim.published - 1})
    if page is not None:
        write_page(rows, page)
    if as_json:
        print_json({"claims": rows})
        return
    titles = ["paper", "quantity", "grade", "published", "simulated", "off"]
    lines = [
        [row["paper"], row["quantity"], row["grade"], *(f"{row[key]:,.4g}" for key in ("published", "simulated"))]
        for row in rows
    ]
    print_table(titles, [[*line, f"{row['off']:+.1%}"] for line, row in zip(lines, rows, strict=True)])
    click.echo()
    for line in dict.fromkeys(f"{row['paper']}, {row['place']}: {row['gap']}" for row in rows):
        click.echo(line)
    if page is not None:
        click.echo(f"\nwrote {page}")
