"""Fixes of errors name options on the command line, and arguments in Python."""

import pytest

from thrifty.core.errors import TYPED, UsageError, for_reader


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("--set data.batch=16", 'settings={"data.batch": 16}'),
        ("--set data.label_column=NAME, of the labels", 'settings={"data.label_column": "…"}, of the labels'),
        ("--set objective.packed=false", 'settings={"objective.packed": False}'),
        (
            "--set techniques.precision.mixed.format=bfloat16",
            'settings={"techniques.precision.mixed.format": "bfloat16"}',
        ),
        ("--without a.b or --without c", 'techniques without "a.b" or techniques without "c"'),
        ("--with a.b:x=2 in its place", 'techniques=[…, "a.b:x=2"] in its place'),
        ("--memory 600MB, --allow different, or less", 'memory="600MB", allow="different", or less'),
        ("--no-probe plans by counts", "probe=False plans by counts"),
        ("--seconds 126 looks further", "seconds=126 looks further"),
        ("--ranks or --drop-weights", "ranks=… or drop_weights=…"),
        ("--lr 2e-4; then", "techniques=[thrifty.AdamW(lr=2e-4)]; then"),
        ("leave out --disk", "leave out disk=…"),
        ('--prompt "a picture"', 'prompt=… "a picture"'),
        (
            '--set techniques.growth.compound.moments="reset"',
            'settings={"techniques.growth.compound.moments": "reset"}',
        ),
        ("torchrun --nproc-per-node 2 script.py", "torchrun --nproc-per-node 2 script.py"),
        ("a-- b --- c", "a-- b --- c"),
        ("thrifty plan text --memory 1GB", "thrifty plan text --memory 1GB"),
    ],
)
def test_options_of_a_fix_become_arguments_in_python(typed: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TYPED, raising=False)
    assert for_reader(typed) == called and str(UsageError("it", typed)) == f"it\n  fix: {called}"
    monkeypatch.setenv(TYPED, "1")
    assert for_reader(typed) == typed and str(UsageError("it", typed)) == f"it\n  fix: {typed}"
