"""Counter of files that every kind of data opens while a run is prepared."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

from thrifty.core.recipe import Recipe
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.training import data_opening, run_setup


@contextmanager
def opened_kinds() -> Iterator[list[str]]:
    """Yield the names of the kinds of data that this process opens within the block."""
    names: list[str] = []

    def open_counted(kind: DataKind, open_kind, request: DataRequest):
        names.append(kind.name)
        return open_kind(request)

    with ExitStack() as patches:
        for kind in data_opening.DATA_KINDS.values():
            patches.enter_context(patch.object(kind, "open", partial(open_counted, kind, kind.open)))
        yield names


def prepared_on_a_rank(recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """Return the kinds of data that this rank opens to prepare a run, and the identity of the data."""
    with opened_kinds() as names:
        prepared = run_setup.prepare_run(recipe, quiet=True)
    return names, dict(prepared.data.identity)
