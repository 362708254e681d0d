"""Heartbeats of ranks. If a rank dies, hangs or loses contact, the run ends on all ranks, and one message names the
rank.

Every rank writes its current activity and code position into the shared store. Every rank checks the processes of its
own machine, the heartbeat of the next rank, and its own progress. The first detected failure is the verdict of all
ranks. A rank that waits for a lost rank does not end by itself; this module ends its process. torch's timeouts of
collectives cannot distinguish a hanging rank from a compiling rank.

`THRIFTY_SILENCE` (30): seconds without a heartbeat, or without the store, after which a rank counts as lost.
`THRIFTY_HANG` (600): seconds without progress after which a rank counts as hanging. Steps of known duration have a
lower limit, see `progress_watchdog.py`.
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
"""Seconds that a rank has to end by itself after the verdict."""

T = TypeVar("T")
_own: "Heartbeat | None" = None


@contextmanager
def run_heartbeat(depart: Callable[[], None]) -> Iterator[Rendezvous]:
    """Run the heartbeat of this rank inside the context, and call `depart` at the end. An error inside the context is
    raised on every rank, and one rank of each host prints the error."""
    global _own
    _own = Heartbeat(_seconds("THRIFTY_SILENCE", 30), _seconds("THRIFTY_HANG", 600))
    with ExitStack() as until_departed:
        try:
            yield _own.meeting
            _own.leave()
        except BaseException as error:
            until_departed.enter_context(StopRequest())  # torchrun stops all ranks once one has failed
            ending = _own.judged(error)
            if ending is error:
                raise
            raise ending from error
        finally:
            _own = None
            last = threading.Timer(4 * GRACE, os._exit, [1])  # `depart` may wait for ranks that are lost
            last.daemon = True
            last.start()
            depart()
            last.cancel()


def at(doing: str, *, step: bool = False) -> None:
    """Record that this rank begins an activity, such as "step 12"; `step` marks repeated activities of equal length."""
    if _own:
        _own.pulse.at(doing, step=step)


def report_progress(items: Iterable[T], doing: str) -> Iterator[T]:
    """Yield each item, and count it as progress."""
    for item in items:
        at(doing)
        yield item


@contextmanager
def explain_failure(last_words: Callable[[str], None]) -> Iterator[None]:
    """Replace torch's error about lost contact by an error that names the lost rank. If another thread must end this
    process, `last_words` receives the cause instead."""
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
    """The heartbeat of this rank: two threads in addition to the training thread. `_beat` uses the store and may block;
    `_watch` never blocks."""

    def __init__(self, silence: float, hang: float):
        self.silence, self.interval = silence, min(1.0, silence / 5)
        self.meeting, self.pulse = Rendezvous(max(hang, silence)), ProgressWatchdog(hang)
        self.rank, self.name = self.meeting.rank, f"rank {self.meeting.rank} on {self.meeting.process}"
        self.last_words: Callable[[str], None] | None = None
        self.verdict: FailureVerdict | None = None
        self.speaks = False
        """True if this rank prints the verdict. One rank on each host prints it."""
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
        """Record that this rank has finished, and stop its heartbeat."""
        self._leaving = True
        self._wake.set()
        self._over.wait(GRACE)
        self._over.set()

    def judged(self, error: BaseException) -> BaseException:
        """Return the error that ends the run, after one rank of each host has printed it."""
        if lost_contact(error):
            error = self.cause(error)
        fault = self._own_fault(error)
        verdict = self._settle(fault) or fault  # without the store each rank reports its own error
        self._over.set()
        if self.speaks or self.verdict is None:
            _say(verdict.text)  # the traceback of an unexpected error follows
        if verdict.rank != self.rank and verdict.text != str(error):
            error = verdict.as_error()
        if isinstance(error, ThriftyError):
            error.is_reported = True
        return error

    def cause(self, error: BaseException) -> ThriftyError:
        """Return the error that names the rank at fault, for an error that only reports lost contact."""
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
            what = f"{self.name} received a stop signal in {self.pulse.doing}"
            return FailureVerdict(self.rank, what, int(error.code or 0), silent=True)
        first = (str(error).splitlines() or [""])[0]
        what = f"{self.name} failed in {self.pulse.doing}: {type(error).__name__}: {first}"
        return FailureVerdict(self.rank, f"{what}\n  fix: see its traceback; {restart_advice()}")

    def _settle(self, charge: FailureVerdict) -> FailureVerdict | None:
        """Return the verdict of all ranks: `charge`, or an earlier verdict if there is one. Return None if the store is
        unreachable."""
        self._charge = charge
        self._wake.set()
        self._judged.wait(GRACE)
        return self.verdict

    def _beat(self) -> None:
        ticks = TickTimer()
        while not self._over.is_set():
            with suppress(RuntimeError):  # the store is gone; `_watch` notices that there are no more heartbeats
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
                stored = self._store.compare_set("verdict", "", charge.as_json() if charge else "")
                verdict = FailureVerdict.from_json(stored)
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
                    f"{self.name} could not reach the store at {self.meeting.address} for {seconds:.0f} s, "
                    f"last seen in {self.pulse.doing}: its network is down, or the process with the store has ended\n"
                    f"  fix: {restart_advice()}"
                )
                self._judge(FailureVerdict(self.rank, what), speaks=self.meeting.is_first_near)
                self._is_cut_off = True
            if self.verdict is not None and not self._over.wait(GRACE):
                self._end(self.verdict)

    def _end(self, verdict: FailureVerdict) -> None:
        """Print the verdict, kill a hanging process on this machine, write the cause, and exit this process."""
        if self.speaks:
            _say(verdict.text)
            if verdict.kill and (lost := ProcessIdentity.from_json(verdict.kill)).is_near and not lost.is_gone:
                os.kill(lost.pid, signal.SIGKILL)  # torchrun would wait half a minute for it
        if self.last_words:
            writing = threading.Thread(target=self.last_words, args=(verdict.text,), daemon=True)
            writing.start()
            writing.join(GRACE)
        if self._is_cut_off and self.speaks and operator.ge(*restarts()):
            end_agent(GRACE)
        os._exit(verdict.exit_code)


def _say(text: str) -> None:
    os.write(2, f"thrifty: {text}\n".encode())  # bypasses Python's buffers, whose lock a blocked thread may hold


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    with suppress(ValueError):
        seconds = float(text) if text else default
        if seconds > 0:
            return seconds
    raise UsageError(f"{variable} is {text!r}, not a positive number", fix=f"export {variable}={default:.0f}")
