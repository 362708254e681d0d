"""Every test runs on one thread and keeps out of the user's own cache."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

torch.set_num_threads(1)
# machines that test are shared: how long an example takes there is no finding
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """What is imported stays to the end: each of the thousands of collections that tests ask for need not look."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, as torchrun with one process makes it."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
