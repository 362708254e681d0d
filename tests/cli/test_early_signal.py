"""A signal before a verb has begun its work."""

import signal

import pytest

from thrifty.cli.main import _leave


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_verb_is_imported_ends_in_one_line(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as left:
            _leave(number, None)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert left.value.code == 128 + number
    assert capfd.readouterr().err == f"thrifty: stopped by signal {number.value}\n"
