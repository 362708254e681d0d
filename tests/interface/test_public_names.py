"""Public names of `import thrifty`: names, signatures and stubs are of one list."""

import subprocess
import sys

import pytest
from tools.public_stubs import OPTIMIZERS, SNAPSHOT, optimizer_stub, snapshot

import thrifty
from thrifty import techniques
from thrifty.core.technique import Technique


def test_names_and_signatures_are_those_of_the_snapshot() -> None:
    """A change is meant: `python tools/public_stubs.py` writes it down, and the changelog tells it."""
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8")


def test_the_stub_of_the_optimizers_is_that_of_their_techniques() -> None:
    assert optimizer_stub() == OPTIMIZERS.read_text(encoding="utf-8")


def test_every_technique_has_a_public_class() -> None:
    values = [getattr(thrifty, name) for name in dir(thrifty)]
    public = [
        each for each in values if isinstance(each, type) and issubclass(each, Technique) and each is not Technique
    ]
    assert sorted(each.name for each in public) == techniques.own_names()


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, thrifty; assert 'torch' not in sys.modules and 'ast' not in sys.modules, sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'Lora'"):
        _ = thrifty.Lorra


def test_a_public_name_is_no_submodule() -> None:
    """A submodule that is imported later would take the place of a function of its name."""
    import pkgutil

    modules = {each.name for each in pkgutil.iter_modules(thrifty.__path__)}
    assert modules & set(dir(thrifty)) == {"optim"}
