"""C++ kernels: they build if there is a compiler, are optional otherwise, and outlive no tensor."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from thrifty.kernels import cpp_extension
from thrifty.kernels.compiled_quantization import CODES
from thrifty.kernels.cpp_extension import NativeLibrary, in_parts
from thrifty.kernels.sparse.compiled_products import PRODUCTS
from thrifty.machine.cpu_features import cpp_compiler


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("library", [CODES, PRODUCTS], ids=["codes", "products"])
def test_libraries_build_with_a_compiler(library: NativeLibrary) -> None:
    """Otherwise, other tests of compiled code would compare plain code with itself."""
    assert library.is_there()


def test_library_that_does_not_build_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not NativeLibrary("this is no C++").is_there()
    monkeypatch.setattr(cpp_extension, "cpp_compiler", lambda: None)
    assert not NativeLibrary('extern "C" void nothing() {}').is_there()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("count", "fewest"), [(0, 1), (1, 1), (7, 1), (100, 1), (100, 60), (100, 200)])
def test_parts_partition_the_range(count: int, fewest: int) -> None:
    seen: list[tuple[int, int]] = []
    in_parts(lambda first, last: seen.append((first, last)), count, fewest)
    assert sorted(number for part in seen for number in range(*part)) == [*range(count)]
    assert len(seen) == 1 or min(last - first for first, last in seen) >= fewest


@pytest.mark.usefixtures("two_threads")
def test_interrupted_thread_waits_for_the_others() -> None:
    """The caller frees the tensors when `in_parts` ends."""
    here, both_began = threading.current_thread(), threading.Barrier(2)
    began, underway = set[threading.Thread](), set[int]()

    def work(first: int, last: int) -> None:
        underway.add(first)
        if (thread := threading.current_thread()) not in began:
            began.add(thread)
            both_began.wait(30)
        if thread is here:
            raise KeyboardInterrupt
        time.sleep(0.02)
        underway.discard(first)

    with pytest.raises(KeyboardInterrupt):
        in_parts(work, 8)
    assert len(underway) == 1  # the interrupted part
