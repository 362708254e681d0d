"""A plan's search: legal, within the memory, as good as trying everything, and content with changing nothing."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_runs import BATCH, CATALOGUE, MB, PLANNER, by_expectation, formula, searching

from thrifty.composition.compose import Run, compose, refuse_illegal
from thrifty.core.errors import InfeasibleError, RefusedError
from thrifty.core.footprint import Footprint
from thrifty.core.recipe import Budget
from thrifty.core.technique import Numerics
from thrifty.planning import plan_search
from thrifty.planning.cost_estimates import COUNTED_HIGH, StepTiming
from thrifty.planning.forecast import PlanRequest
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import NEAR, PROBES, PlanSearch, TimeOf
from thrifty.planning.probe_jobs import ProbeError
from thrifty.planning.search_space import NUMERICS_ORDER


def everything(search: PlanSearch) -> list[PlanCandidate]:
    """All legal combinations that fit, by counting each."""
    found = []
    for candidate in search.combinations():
        run = compose(search.plain, candidate.techniques, search.steps)
        if formula(run).memory * COUNTED_HIGH <= search.memory:
            found.append(candidate)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("memory", [200, 260, 400, 700, 2000])
@pytest.mark.parametrize("allow", [Numerics.EXACT, Numerics.ROUNDING])
def test_the_plan_is_as_fast_as_the_best_of_all_combinations(memory: float, allow: Numerics) -> None:
    search = searching(memory, allow, time=by_expectation)
    candidates = None
    try:
        best = search.run()
    except InfeasibleError:
        assert not everything(search)
        return
    candidates = everything(search)
    refuse_illegal(best.techniques)
    assert best.footprint is not None and best.footprint.memory * COUNTED_HIGH <= memory * MB
    least = min(candidate.relative for candidate in candidates)
    assert search.seconds(best) <= least * 1.06  # what cannot be told apart goes to what changes less
    assert all(NUMERICS_ORDER.index(way.numerics) <= NUMERICS_ORDER.index(allow) for way in best.ways)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.floats(120, 1200), st.floats(1.0, 2.0))
def test_more_memory_never_gives_a_slower_plan(memory: float, factor: float) -> None:
    def seconds(memory: float) -> float:
        search = searching(memory)
        try:
            return search.seconds(search.run())
        except InfeasibleError:
            return math.inf

    assert seconds(memory * factor) <= seconds(memory) * 1.06


def test_a_recipe_that_fits_and_is_fast_is_left_as_it_is() -> None:
    search = searching(math.inf, Numerics.EXACT, time=by_expectation)
    assert search.run().ways == ()
    assert search.probes == 1  # whatever else is allowed only costs time


def test_what_is_hoped_to_be_faster_is_run_and_left_out_when_it_is_not() -> None:
    def no_faster(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), least=(1.0,), passes=(1.0,))

    search = searching(math.inf, Numerics.DIFFERENT, time=no_faster)
    assert search.run().ways == ()
    assert any("precision.mixed" in candidate.label for candidate in search.tried) or len(search.tried) > 1


def test_what_is_measured_to_be_faster_is_taken() -> None:
    fast = searching(math.inf, Numerics.ROUNDING, time=by_expectation, base=(CATALOGUE["memory.recompute"](),))
    assert "without memory.recompute" in fast.run().label


def test_noise_larger_than_the_gain_changes_nothing() -> None:
    def noisy(candidate: PlanCandidate, bar: float) -> StepTiming:
        seconds = 1.0 if not candidate.ways else 0.9
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,), spread=0.5)

    assert searching(math.inf, Numerics.DIFFERENT, time=noisy).run().ways == ()


def test_nothing_that_held_too_much_when_it_ran_is_proposed() -> None:
    def heavy(candidate: PlanCandidate, bar: float) -> StepTiming:
        timing = by_expectation(candidate)
        return replace(timing, memory=timing.memory + 300 * MB)

    search = searching(700.0, time=heavy)
    best = search.run()
    assert best.timing is not None and best.timing.memory * search.margin <= 700 * MB
    assert all("does not fit" in why for why in search.misfits.values())


def test_a_probe_that_fails_rules_its_candidate_out_and_says_why() -> None:
    def fails(candidate: PlanCandidate, bar: float) -> StepTiming:
        if any("recompute" in way.label for way in candidate.ways):
            raise ProbeError("its process was killed")
        return by_expectation(candidate)

    search = searching(500.0, Numerics.EXACT, time=fails)
    assert "recompute" not in search.run().label
    assert "its process was killed" in search.misfits.values()


def test_where_every_probe_fails_that_is_said_and_not_that_memory_is_short() -> None:
    def fails(candidate: PlanCandidate, bar: float) -> StepTiming:
        raise ProbeError("the loss is nan")

    with pytest.raises(InfeasibleError, match="ran its steps: the loss is nan"):
        searching(2000.0, Numerics.EXACT, time=fails).run()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RefusedError("memory.offload_optimizer: there is no disk"), "memory.offload_optimizer: there is no disk"),
        (RuntimeError("unsupported operation\nof torch"), "RuntimeError: unsupported operation"),
        (KeyError("next"), "KeyError: 'next'"),
        (AssertionError(), "AssertionError"),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_an_option_that_is_refused_or_fails_is_left_out_and_its_reason_is_kept(
    error: Exception, reason: str, together: bool
) -> None:
    def failing(run):  # type: ignore[no-untyped-def]
        changes = len(run.techniques) - len(search.base)
        if changes > 1 if together else "memory.offload_optimizer" in {each.name for each in run.techniques}:
            raise error
        return formula(run)

    search = searching(500.0, count=failing)
    chosen = search.run()
    assert len(chosen.ways) == 1 if together else "offload_optimizer" not in chosen.label
    assert reason in (search.misfits if together else search.refused).values()


def test_where_nothing_fits_the_answer_is_what_it_would_take() -> None:
    with pytest.raises(InfeasibleError, match="the least is about") as error:
        searching(60.0, Numerics.EXACT).run()
    assert "--memory" in error.value.fix and "--allow different" in error.value.fix
    named = float(error.value.fix.split("MB")[0].split()[-1])
    assert searching(named, Numerics.EXACT).run().ways


def test_a_recipe_with_micro_batches_may_get_other_ones() -> None:
    halves = CATALOGUE["large_batch.gradient_accumulation"](micro_batches=2)  # type: ignore[call-arg]
    search = searching(300.0, Numerics.ROUNDING, base=(halves,))
    labels = [way.label for way in search.ways["micro-batches"]]
    assert labels == [
        "without large_batch.gradient_accumulation",
        "large_batch.gradient_accumulation",
        "large_batch.gradient_accumulation:micro_batches=8",
    ]
    parts = [candidate.parts for candidate in (search.look_at_singles(), *search.combinations())[1:]]
    assert {*parts} == {1, 2, 4, 8}


def test_of_many_numbers_of_micro_batches_the_largest_is_counted_and_the_others_follow() -> None:
    counts: list[int] = []

    def noted(run):  # type: ignore[no-untyped-def]
        counts.extend(t.micro_batches for t in run.techniques if t.name == "large_batch.gradient_accumulation")
        return formula(run)

    search = searching(2000.0, Numerics.ROUNDING, count=noted)
    search.look_at_singles()
    assert counts == [BATCH] and {way.parts for way in search.told} == {2, 4}
    for way in [*search.told]:
        told = search.singles[way]
        assert search.alone(way) == search.counted((way,))
        for name in ("activations", "optimizer", "flops"):
            assert getattr(told, name) == pytest.approx(getattr(search.singles[way], name))
    assert not search.told


def test_where_the_largest_is_refused_each_number_of_micro_batches_is_counted() -> None:
    def refusing(run):  # type: ignore[no-untyped-def]
        if any(technique.micro_batches == BATCH for technique in run.techniques):
            raise RefusedError("large_batch.gradient_accumulation: not one by one")
        return formula(run)

    search = searching(2000.0, Numerics.ROUNDING, count=refusing)
    search.look_at_singles()
    assert not search.told and {way.parts for way in search.singles if way.parts > 1} == {2, 4}


def test_what_is_expected_far_behind_the_best_is_not_run() -> None:
    run: list[PlanCandidate] = []

    def as_promised(candidate: PlanCandidate, bar: float) -> StepTiming:
        run.append(candidate)
        return by_expectation(candidate)

    search = searching(700.0, Numerics.ROUNDING, time=as_promised)
    search.finalists = 100
    best = search.run()
    assert len(run) > 1 and all(candidate.relative <= NEAR * best.relative for candidate in run)
    assert any(candidate.relative > NEAR * best.relative for candidate in search.combinations())


def test_a_probe_is_told_from_where_on_a_step_is_too_slow_to_matter() -> None:
    bars: list[float] = []

    def noted(candidate: PlanCandidate, bar: float) -> StepTiming:
        bars.append(bar)
        return by_expectation(candidate)

    searching(700.0, Numerics.ROUNDING, time=noted).run()
    assert bars[0] == math.inf and all(later <= sooner for sooner, later in pairwise(bars)) and bars[-1] < 10


def test_what_does_not_fit_the_disk_is_not_proposed_and_where_nothing_does_that_is_said() -> None:
    def cramped(candidate: PlanCandidate) -> str:
        return "" if "optimizer_state" in candidate.label else "does not fit the disk: 9 MB of checkpoints"

    assert "optimizer_state" in searching(2000.0, Numerics.DIFFERENT, no_room=cramped).run().label
    with pytest.raises(InfeasibleError, match="what was counted does not fit the disk: 9 MB of checkpoints") as error:
        searching(2000.0, Numerics.EXACT, no_room=cramped).run()
    assert "--disk" in error.value.fix


def test_candidates_that_differ_in_micro_batches_alone_share_a_probe() -> None:
    run: list[PlanCandidate] = []

    def noted(candidate: PlanCandidate, bar: float) -> StepTiming:
        run.append(candidate)
        return by_expectation(candidate)

    search = searching(700.0, Numerics.ROUNDING, time=noted)
    search.run()
    assert len({search.kind(candidate) for candidate in run}) == len(run)
    shared = [candidate for candidate in search.tried if candidate.ways not in {each.ways for each in run}]
    for candidate in shared:  # its process holds fewer tensors than that which was run
        assert candidate.timing is not None and candidate.footprint is not None
        assert candidate.timing.memory == pytest.approx(candidate.footprint.memory)
    assert shared


def test_a_budget_is_in_whole_steps_and_refused_where_it_pays_for_none() -> None:
    assert PlanRequest(flops=1050.0).budget(Budget(steps=3), 100.0) == Budget(steps=10)
    assert PlanRequest(tokens=5.0, seconds=9.0).budget(Budget(steps=3), 100.0) == Budget(tokens=5.0)
    assert PlanRequest(seconds=9.0).budget(Budget(steps=3), 100.0) == Budget(seconds=9.0)
    assert PlanRequest().budget(Budget(steps=3), 100.0) == Budget(steps=3)
    with pytest.raises(InfeasibleError, match="do not pay for one step"):
        PlanRequest(flops=10.0).budget(Budget(steps=3), 100.0)


def holding(compiled: float, plain: float, run: list[PlanCandidate] | None = None) -> TimeOf:
    """Probes of processes that hold so many MB beyond their tensors, with compiled code and without."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        if run is not None:
            run.append(candidate)
        beyond = compiled if candidate.is_compiled else plain
        timing = by_expectation(candidate)
        return replace(timing, memory=timing.memory + beyond * MB)

    return time


def test_what_a_compiler_takes_is_charged_to_compiled_candidates_alone() -> None:
    run: list[PlanCandidate] = []
    search = searching(700.0, base=(CATALOGUE["compile"](),), time=holding(500.0, 40.0, run))
    best = search.run()
    assert not best.is_compiled and run[0].is_compiled
    assert sum(candidate.is_compiled for candidate in run) <= PROBES // 2


def test_compiled_candidates_of_which_none_fits_leave_probes_to_the_others() -> None:
    run: list[PlanCandidate] = []
    surplus = iter(range(200, 2000, 200))

    def ever_more(candidate: PlanCandidate, bar: float) -> StepTiming:
        return holding(next(surplus) if candidate.is_compiled else 0.0, 0.0, run)(candidate, bar)

    search = searching(300.0, base=(CATALOGUE["compile"](),), time=ever_more)
    assert not search.run().is_compiled
    assert sum(candidate.is_compiled for candidate in run) <= PROBES // 2


def test_nothing_is_said_not_to_fit_before_the_leanest_was_run() -> None:
    def lighter_than_counted(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), memory=(60 if candidate.ways else 900) * MB)

    assert searching(70.0, Numerics.EXACT, time=lighter_than_counted).run().ways
    run: list[PlanCandidate] = []
    search = searching(120.0, Numerics.EXACT, time=holding(100.0, 100.0, run))
    with pytest.raises(InfeasibleError, match=r"the least that was run is memory.*: its process took \d+ MB") as error:
        search.run()
    estimates = {candidate.ways: search.estimated(candidate.ways) for candidate in search.combinations()}
    assert estimates[run[-1].ways] == min(estimates.values())
    named = float(error.value.fix.split("MB")[0].split()[-1])
    assert searching(named, Numerics.EXACT, time=holding(100.0, 100.0)).run().ways


def keeping(kept: float, given_back: float) -> TimeOf:
    """Probes of processes that hold so many MB beyond their tensors: where freed memory stays, and where it goes."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        gives_back = any(technique.limits_activation_bytes for technique in candidate.techniques)
        timing = by_expectation(candidate)
        return replace(timing, memory=timing.memory + (given_back if gives_back else kept) * MB)

    return time


@pytest.mark.parametrize("memory", [260.0, 330.0])
def test_freed_memory_that_stays_is_charged_to_processes_that_keep_it_alone(memory: float) -> None:
    """The candidate with the fewest bytes of tensors keeps freed memory, so its process is not the leanest."""
    search = searching(memory, Numerics.EXACT, time=keeping(kept=250.0, given_back=5.0))
    best = search.run()
    assert best.timing is not None and best.timing.memory * search.margin <= memory * MB
    assert any(technique.limits_activation_bytes for technique in best.techniques)


@settings(max_examples=25)
@given(st.floats(100, 900), st.floats(0, 400), st.floats(0, 40), st.booleans())
def test_what_is_said_to_fit_does_and_what_it_would_take_suffices(
    memory: float, kept: float, given_back: float, counted_alone: bool
) -> None:
    time = None if counted_alone else keeping(kept, given_back)
    try:
        best = searching(memory, Numerics.EXACT, time=time).run()
    except InfeasibleError as error:
        named = float(error.fix.split("MB")[0].split()[-1])
        assert named > memory
        assert searching(named, Numerics.EXACT, time=time).run().footprint
    else:
        assert best.footprint is not None
        assert (best.timing.memory if best.timing else best.footprint.memory) <= memory * MB


def test_a_verdict_that_nothing_fits_offers_more_seconds_where_time_was_up() -> None:
    search = searching(100.0, Numerics.EXACT, time=keeping(500.0, 50.0), allowance=lambda step: 0.0)
    with pytest.raises(
        InfeasibleError, match=r"stopped after 0 s, with options .*no combination that was tried fits"
    ) as error:
        search.run()
    assert error.value.fix.startswith("--seconds 60 or --memory ")


def test_without_probes_all_the_time_of_a_plan_is_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(plan_search, "monotonic", lambda: seconds[0])

    def counted(run: Run) -> Footprint:
        seconds[0] += 1.0
        return formula(run)

    search = searching(math.inf, Numerics.EXACT, count=counted, began=0.0)
    allowed = 1.5 * sum(map(len, search.ways.values()))
    search.allowance = lambda step: allowed
    search.run()
    assert not search.stopped and not search.refused


@pytest.mark.parametrize(
    ("seconds", "budget", "allowed"),
    [(None, 60.0, 60.0), (None, 3000.0, 600.0), (7.0, 60.0, 7.0), (7.0, 3000.0, 7.0)],
)
def test_planning_takes_a_minute_at_least_and_a_fifth_of_a_longer_run(
    seconds: float | None, budget: float, allowed: float
) -> None:
    planner = replace(PLANNER, wanted=PlanRequest(seconds=budget), seconds=seconds)
    assert planner._allowance(1.0) == allowed


def test_the_process_counts_and_a_probe_says_how_large_it_is() -> None:
    assert searching(1000.0, process=300 * MB, time=by_expectation).run().ways == searching(700.0).run().ways
    run: list[PlanCandidate] = []

    def larger(candidate: PlanCandidate, bar: float) -> StepTiming:
        run.append(candidate)
        return replace(by_expectation(candidate), process=900 * MB)

    search = searching(1000.0, Numerics.EXACT, time=larger)
    with pytest.raises(InfeasibleError, match="900 MB of it before it builds the model"):
        search.run()
    assert run and not run[0].ways

    def as_large(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), process=300 * MB)

    best = searching(1000.0, Numerics.EXACT, time=as_large).run()
    assert best.timing and best.timing.process + best.timing.memory <= 1000 * MB


def test_what_this_machine_has_no_room_for_is_not_run() -> None:
    run: list[PlanCandidate] = []
    with pytest.raises(InfeasibleError, match=r"the least is about .*MB counted\)"):
        searching(60.0, Numerics.EXACT, time=holding(0.0, 0.0, run), free=60 * MB).run()
    assert not run


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_ends_when_its_time_is_up_and_says_what_was_left_out(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    monkeypatch.setattr(plan_search, "monotonic", lambda: seconds[0])

    def counted(run: Run) -> Footprint:
        seconds[0] += 1.0
        return formula(run)

    def timed(candidate: PlanCandidate, bar: float) -> StepTiming:
        seconds[0] += 12.0
        return by_expectation(candidate)

    memory = math.inf if fits else 420.0
    search = searching(memory, Numerics.DIFFERENT, count=counted, time=timed, allowance=lambda step: 40.0, began=0.0)
    best = search.run()
    assert seconds[0] <= 40.0 + 12.0 and best.timing and search.stopped
    assert "not counted" in " ".join(search.refused.values())
    in_time = searching(memory, Numerics.DIFFERENT, count=counted, time=timed, began=seconds[0])
    assert in_time.run().least_step <= best.least_step and not in_time.stopped


def test_without_time_the_recipe_alone_is_run() -> None:
    run: list[PlanCandidate] = []
    search = searching(math.inf, Numerics.DIFFERENT, time=holding(0.0, 0.0, run), allowance=lambda step: 0.0)
    assert search.run().ways == () and len(run) == 1 and search.stopped


def test_less_memory_than_a_process_without_its_model_is_refused_before_options_are_counted() -> None:
    def process(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), process=900 * MB)

    for how in (dict(time=process), dict(process=900 * MB)):
        search = searching(5.0, **how)
        with pytest.raises(
            InfeasibleError, match="no combination fits in 5 MB: a process holds 900 MB before"
        ) as refusal:
            search.run()
        assert not search.singles and "seconds" not in str(refusal.value)
