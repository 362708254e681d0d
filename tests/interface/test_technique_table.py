"""The kept table of where each technique works is whole, honest, and what its cells say again when they are run."""

import json
from pathlib import Path

import pytest
from benchmarks import technique_table

from thrifty import techniques

TABLE = json.loads(technique_table.FILE.read_text("utf-8"))["techniques"]
CELLS = [
    (column, name)
    for column in ("own loop", "transformers model")
    for name in techniques.own_names()
    if not name.startswith(("parallelism.", "compile"))
]


def test_every_technique_has_cells_without_errors() -> None:
    assert sorted(TABLE) == techniques.own_names()
    for name, row in TABLE.items():
        assert row.keys() == technique_table.COLUMNS.keys(), name
        for cell in row.values():
            assert cell.startswith(("yes (", "needs the trainer: ", "refused: ")), (name, cell)


def test_so_many_work_in_a_loop_by_hand_on_one_of_its_two_models() -> None:
    loops = ("own loop", "transformers model")
    assert sum(any(row[column].startswith("yes") for column in loops) for row in TABLE.values()) >= 65


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("column", "name"), CELLS)
def test_a_cell_that_is_run_again_says_the_same(column: str, name: str, tmp_path: Path) -> None:
    found = technique_table.cell(column, name, tmp_path)
    assert found.partition("(")[0].partition(":")[0] == TABLE[name][column].partition("(")[0].partition(":")[0], found
