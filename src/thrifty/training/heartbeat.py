"""A rank that dies, hangs or is cut off ends the run on all ranks, soon, and is named once.

Every rank writes beats into the store where the ranks meet: what it does, and where it stands in the code. Each looks
at the processes of its own machine, at the beat of the next rank, and at its own progress. What it finds becomes the
verdict, which is one for all: the first. A rank that does not end by itself then, since it waits for one that is lost,
is ended from here. Time limits on collectives, which torch has, cannot tell a rank that hangs from one that compiles.

`THRIFTY_SILENCE` (30): seconds without a beat, or without the store, after which a rank is lost. `THRIFTY_HANG` (600):
seconds without progress after which one hangs; known steps have less, see `progress_watchdog.py`.
"""

import json
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.training.failure_verdict import FailureVerdict, lost_contact, restart_advice, restarts
from thrifty.training.fault_detection import ASIDE, FaultDetector
from thrifty.training.progress_watchdog import ProgressWatchdog, StallTimer, TickTimer
from thrifty.training.rendezvous import ProcessIdentity, Rendezvous, end_agent
from thrifty.training.stack_state import thread_state
from thrifty.training.stop_signals import StopRequest

GRACE = 5.0
"""Seconds that a rank has to end by itself once there is a verdict."""

T = TypeVar("T")
_own: "Heartbeat | None" = None


@contextmanager
def run_heartbeat(depart: Callable[[], None]) -> Iterator[Rendezvous]:
    """The heartbeat of one start of all ranks, for as long as the block lasts, and `depart` at its end. An error in the
    block is told by one rank of each host, and raised on every rank as told."""
    global _own
    _own = Heartbeat(_seconds("THRIFTY_SILENCE", 30), _seconds("THRIFTY_HANG", 600))
    with ExitStack() as until_departed:
        try:
            yield _own.meeting
            _own.leave()
        except BaseException as error:
            until_departed.enter_context(StopRequest())  # torchrun asks all to stop once one has failed
            ending = _own.judged(error)
            if ending is error:
                raise
            raise ending from error
        finally:
            _own = None
            last = threading.Timer(4 * GRACE, os._exit, [1])  # to leave may mean to wait for ranks that are lost
            last.daemon = True
            last.start()
            depart()
            last.cancel()


def at(doing: str, *, step: bool = False) -> None:
    """This rank begins something, such as "step 12"; `step` for what repeats and takes alike each time."""
    if _own:
        _own.pulse.at(doing, step=step)


def report_progress(things: Iterable[T], doing: str) -> Iterator[T]:
    """The things, each of which is progress."""
    for thing in things:
        at(doing)
        yield thing


@contextmanager
def explain_failure(last_words: Callable[[str], None]) -> Iterator[None]:
    """What torch says of lost contact becomes an error that names the lost rank. `last_words` writes down why the run
    ended where no error can, since the thread that trains is beyond reach."""
    if _own is None:
        yield
        return
    _own.last_words = last_words
    try:
        yield
    except Exception as error:
        if not lost_contact(error):
            raise
        raise _own.cause(error) from error
    finally:
        _own.last_words = None


class Heartbeat:
    """Two threads beside the one that makes it and trains: `_beat` talks with the store, which may hold it up, and
    `_watch` waits for nothing."""

    def __init__(self, silence: float, hang: float):
        self.silence, self.interval = silence, min(1.0, silence / 5)
        self.meeting, self.pulse = Rendezvous(max(hang, silence)), ProgressWatchdog(hang)
        self.rank, self.name = self.meeting.rank, f"rank {self.meeting.rank} on {self.meeting.process}"
        self.last_words: Callable[[str], None] | None = None
        self.verdict: FailureVerdict | None = None
        self.speaks = False
        """Whether this rank tells the verdict: one on each host does."""
        self._store = self.meeting.connection()
        self._findings = FaultDetector(
            self._store, self.rank, self.meeting.ranks, self.meeting.near, silence, self.pulse
        )
        self._trained_by = threading.get_ident()
        self._beats = 0
        self._charge: FailureVerdict | None = None
        self._lost = self._leaving = self._is_cut_off = False
        self._judged, self._over, self._wake = threading.Event(), threading.Event(), threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def leave(self) -> None:
        """This rank has done its part, and will not beat again."""
        self._leaving = True
        self._wake.set()
        self._over.wait(GRACE)
        self._over.set()

    def judged(self, error: BaseException) -> BaseException:
        """The error to end with, which one rank has told then."""
        if lost_contact(error):
            error = self.cause(error)
        fault = self._own_fault(error)
        verdict = self._settle(fault) or fault  # where nobody can be asked, each says what it knows
        self._over.set()
        if self.speaks or self.verdict is None:
            _say(verdict.text)  # of a fault that nobody foresaw the traceback follows
        if verdict.rank != self.rank and verdict.text != str(error):
            error = verdict.as_error()
        if isinstance(error, ThriftyError):
            error.told = True
        return error

    def cause(self, error: BaseException) -> ThriftyError:
        """Whose fault it is that contact was lost."""
        self._lost = True
        self._wake.set()
        self._judged.wait(3 * ASIDE)
        what = f"{self.name} lost contact with the others in {self.pulse.doing}: {str(error).splitlines()[0]}"
        verdict = self._settle(FailureVerdict(self.rank, f"{what}\n  fix: {restart_advice()}"))
        return verdict.as_error() if verdict else ThriftyError(what, restart_advice())

    def _own_fault(self, error: BaseException) -> FailureVerdict:
        if isinstance(error, ThriftyError):
            return FailureVerdict(self.rank, str(error), error.exit_code)
        if isinstance(error, SystemExit):
            what = f"{self.name} was asked to stop in {self.pulse.doing}"
            return FailureVerdict(self.rank, what, int(error.code or 0), silent=True)
        first = (str(error).splitlines() or [""])[0]
        what = f"{self.name} failed in {self.pulse.doing}: {type(error).__name__}: {first}"
        return FailureVerdict(self.rank, f"{what}\n  fix: its traceback says where; {restart_advice()}")

    def _settle(self, charge: FailureVerdict) -> FailureVerdict | None:
        """The verdict of all ranks, which is this one if there was no other; None if the store does not answer."""
        self._charge = charge
        self._wake.set()
        self._judged.wait(GRACE)
        return self.verdict

    def _beat(self) -> None:
        ticks = TickTimer()
        while not self._over.is_set():
            with suppress(RuntimeError):  # the store is gone; `_watch` sees that there are no beats any more
                self._exchange(ticks.next())
            self._wake.wait(0.1 if self._lost else self.interval)
            self._wake.clear()

    def _exchange(self, tick: float) -> None:
        here, leaving = thread_state(self._trained_by), self._leaving
        self.pulse.update(here, tick)
        beat = {"number": self._beats, "doing": self.pulse.doing, "starting": self.pulse.starting, "left": leaving}
        self._store.set(f"beat/{self.rank}", json.dumps(beat | {"where": here.where, "waits": here.waits}))
        self._beats += 1
        if leaving:
            self._over.set()
        elif self.verdict is None:
            known = self._store.check(["verdict"])
            charge = None if known else self._findings.find_failure(tick, self._lost) or self._charge
            if known or charge:
                said = self._store.compare_set("verdict", "", charge.as_json() if charge else "")
                verdict = FailureVerdict.from_json(said)
                mute = verdict.silent and verdict.rank == self.rank
                self._judge(verdict, not mute and self._store.add(f"told/{self.meeting.process.host}", 1) == 1)

    def _judge(self, verdict: FailureVerdict, speaks: bool) -> None:
        self.verdict, self.speaks = verdict, speaks
        self._judged.set()

    def _watch(self) -> None:
        ticks, contact = TickTimer(), StallTimer()
        while not self._over.wait(self.interval / 2):
            seconds = contact.update(self._beats, ticks.next())
            if self.verdict is None and seconds > self.silence:
                what = (
                    f"{self.name} has not reached {self.meeting.address}, where the ranks meet, for {seconds:.0f} s, "
                    f"last seen in {self.pulse.doing}: it is cut off, or the start of all has ended\n"
                    f"  fix: {restart_advice()}"
                )
                self._judge(FailureVerdict(self.rank, what), speaks=self.meeting.is_first_near)
                self._is_cut_off = True
            if self.verdict is not None and not self._over.wait(GRACE):
                self._end(self.verdict)

    def _end(self, verdict: FailureVerdict) -> None:
        """The end of a rank that does not end itself."""
        if self.speaks:
            _say(verdict.text)
            if verdict.kill and (lost := ProcessIdentity.from_json(verdict.kill)).is_near and not lost.is_gone:
                os.kill(lost.pid, signal.SIGKILL)  # torchrun would wait for it half a minute
        if self.last_words:
            writing = threading.Thread(target=self.last_words, args=(verdict.text,), daemon=True)
            writing.start()
            writing.join(GRACE)
        if self._is_cut_off and self.speaks and operator.ge(*restarts()):
            end_agent(GRACE)
        os._exit(verdict.exit_code)


def _say(text: str) -> None:
    os.write(2, f"thrifty: {text}\n".encode())  # past Python's buffers, which a thread beyond reach may hold


def _seconds(variable: str, otherwise: float) -> float:
    text = os.environ.get(variable, "")
    with suppress(ValueError):
        seconds = float(text) if text else otherwise
        if seconds > 0:
            return seconds
    raise UsageError(f"{variable} is {text!r}", fix=f"give a number of seconds, such as {otherwise:.0f}")
