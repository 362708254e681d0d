"""Every test runs on one thread and keeps out of the user's own cache."""

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from counted_products import MEASURED, count_products
from folder_budgets import measure_folders
from hypothesis import settings
from rank_processes import in_a_group_of_one
from table_samples import outside_of_samples
from tiny_runs import DEVICE
from worker_results import FOLDER

from thrifty.core.tensor_tracing import gc_frozen
from thrifty.kernels.sparse.sparse_breakeven import BreakevenCase
from thrifty.machine.cpu_features import cpp_compiler
from thrifty.training.determinism import deterministic_kernels

FINISHED, KEPT = itertools.count(1), [0]
"""Tests, and how many modules there were at each time that what is there was kept."""
torch.set_num_threads(1)
# machines that test are shared: how long an example takes there is no finding; and what a change is judged by are the
# same examples each time, which `make explore` goes beyond
settings.register_profile("whole", deadline=None, derandomize=True, database=None)
settings.register_profile("repeatable", settings.get_profile("whole"), max_examples=40)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests as well, and every entry of large tables")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        config.option.markexpr = ""
        os.environ["THRIFTY_TEST_ALL"] = "1"
        settings.load_profile("whole")
    measure_folders(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left := set(outside_of_samples(items)):
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    if next(FINISHED) % 50 == 0 or len(sys.modules) > KEPT[-1] + 100:
        keep_what_is_there()


def keep_what_is_there() -> None:
    """Freeze imported objects, so that the thousands of garbage collections of tests skip them."""
    gc.collect()
    gc.freeze()
    KEPT.append(len(sys.modules))


@pytest.fixture(scope="session", autouse=True)
def settled_session() -> Iterator[None]:
    with gc_frozen(), deterministic_kernels(DEVICE):
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Native libraries, compiled once and not in each of some hundred processes, and results of long computations."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, results = common / "libraries", common / "results"
    for each in (folder, results):
        each.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(results))
        compiler = cpp_compiler()
        if compiler and Path(compiler).name == "g++":
            patch.setenv("THRIFTY_TEST_COMPILER", compiler)
            patch.setenv("THRIFTY_TEST_LIBRARIES", str(folder))
            patch.setenv("CXX", str(Path(__file__).with_name("support") / "caching_g++"))
        yield


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("thrifty-cache")
    before = os.environ.get("THRIFTY_CACHE")
    os.environ["THRIFTY_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["THRIFTY_CACHE"]
    else:
        os.environ["THRIFTY_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def counted_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        count_products(patch)
        yield


@pytest.fixture
def measured_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the measured costs of sparse products on this machine."""
    monkeypatch.setattr(BreakevenCase, "measured", MEASURED)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with in_a_group_of_one():
        yield
