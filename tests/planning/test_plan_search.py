"""The search for a plan: legal candidates within the memory, as fast as an exhaustive search, with few changes."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_runs import BATCH, CATALOGUE, MB, PLANNER, by_expectation, formula, on_a_clock, searching

from thrifty.composition.compose import Run, compose, refuse_illegal
from thrifty.core.errors import InfeasibleError, RefusedError
from thrifty.core.footprint import Footprint
from thrifty.core.recipe import Budget
from thrifty.core.technique import Numerics
from thrifty.planning.candidate_trials import NEAR, TimeOf
from thrifty.planning.cost_estimates import COUNTED_HIGH, StepTiming
from thrifty.planning.forecast import PlanRequest
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import COUNTS, PROBES, PlanSearch
from thrifty.planning.probe_jobs import ProbeError, ProbeTimeout
from thrifty.planning.search_space import NUMERICS_ORDER


def everything(search: PlanSearch) -> list[PlanCandidate]:
    """Count all legal combinations. Return the combinations that fit."""
    result = []
    for candidate in search.combinations():
        run = compose(search.plain, candidate.techniques, search.steps)
        if formula(run).memory * COUNTED_HIGH <= search.memory:
            result.append(candidate)
    return result


@pytest.mark.sampled(3)
@pytest.mark.parametrize("memory", [200, 260, 400, 700, 2000])
@pytest.mark.parametrize("allow", [Numerics.EXACT, Numerics.ROUNDING])
def test_plans_are_as_fast_as_the_best_combination(memory: float, allow: Numerics) -> None:
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
    assert search.seconds(best) <= least * 1.06  # among equally fast candidates the one with fewer changes wins
    assert all(NUMERICS_ORDER.index(option.numerics) <= NUMERICS_ORDER.index(allow) for option in best.options)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.floats(120, 1200), st.floats(1.0, 2.0))
def test_more_memory_is_never_slower(memory: float, factor: float) -> None:
    def seconds(memory: float) -> float:
        search = searching(memory)
        try:
            return search.seconds(search.run())
        except InfeasibleError:
            return math.inf

    assert seconds(memory * factor) <= seconds(memory) * 1.06


def test_fast_recipes_that_fit_are_unchanged() -> None:
    search = searching(math.inf, Numerics.EXACT, time=by_expectation)
    assert search.run().options == ()
    assert search.probes == 1  # all other allowed options only cost time


def test_options_without_measured_gain_are_dropped() -> None:
    def no_faster(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), least=(1.0,), passes=(1.0,))

    search = searching(math.inf, Numerics.DIFFERENT, time=no_faster)
    assert search.run().options == ()
    assert any("precision.mixed" in candidate.label for candidate in search.tried) or len(search.tried) > 1


def test_options_with_measured_gain_are_used() -> None:
    fast = searching(math.inf, Numerics.ROUNDING, time=by_expectation, base=(CATALOGUE["memory.recompute"](),))
    assert "without memory.recompute" in fast.run().label


def test_gains_below_the_noise_change_nothing() -> None:
    def noisy(candidate: PlanCandidate, bar: float) -> StepTiming:
        seconds = 1.0 if not candidate.options else 0.9
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,), spread=0.5)

    assert searching(math.inf, Numerics.DIFFERENT, time=noisy).run().options == ()


def test_candidates_that_exceed_memory_in_a_probe_are_dropped() -> None:
    def heavy(candidate: PlanCandidate, bar: float) -> StepTiming:
        timing = by_expectation(candidate)
        return replace(timing, memory=timing.memory + 300 * MB)

    search = searching(700.0, time=heavy)
    best = search.run()
    assert best.timing is not None and best.timing.memory * search.margin <= 700 * MB
    assert all("does not fit" in why for why in search.misfits.values())


def test_failed_probes_exclude_their_candidate() -> None:
    def fails(candidate: PlanCandidate, bar: float) -> StepTiming:
        if any("recompute" in option.label for option in candidate.options):
            raise ProbeError("its process was killed")
        return by_expectation(candidate)

    search = searching(500.0, Numerics.EXACT, time=fails)
    assert "recompute" not in search.run().label
    assert "its process was killed" in search.misfits.values()


def test_failure_of_every_probe_is_reported() -> None:
    def fails(candidate: PlanCandidate, bar: float) -> StepTiming:
        raise ProbeError("the loss is nan")

    with pytest.raises(InfeasibleError, match="completed its steps: the loss is nan"):
        searching(2000.0, Numerics.EXACT, time=fails).run()


def test_changes_that_are_allowed_already_are_no_fix() -> None:
    with pytest.raises(InfeasibleError) as error:
        searching(20.0, Numerics.DIFFERENT).run()
    assert "--allow" not in error.value.fix


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
def test_refused_options_are_dropped_with_their_reason(error: Exception, reason: str, together: bool) -> None:
    def failing(run):  # type: ignore[no-untyped-def]
        changes = len(run.techniques) - len(search.base)
        if changes > 1 if together else "memory.offload_optimizer" in {each.name for each in run.techniques}:
            raise error
        return formula(run)

    search = searching(500.0, count=failing)
    chosen = search.run()
    assert len(chosen.options) == 1 if together else "offload_optimizer" not in chosen.label
    assert reason in (search.misfits if together else search.refused).values()


def test_errors_name_the_required_memory() -> None:
    with pytest.raises(InfeasibleError, match="the smallest needs about") as error:
        searching(60.0, Numerics.EXACT).run()
    assert "--memory" in error.value.fix
    assert "or --allow rounding; or --allow different; or a smaller model" in error.value.fix
    named = float(error.value.fix.split("MB")[0].split()[-1])
    assert searching(named, Numerics.EXACT).run().options


def test_micro_batches_of_a_recipe_can_change() -> None:
    halves = CATALOGUE["large_batch.gradient_accumulation"](micro_batches=2)  # type: ignore[call-arg]
    search = searching(300.0, Numerics.ROUNDING, base=(halves,))
    labels = [option.label for option in search.options["micro-batches"]]
    assert labels == [
        "without large_batch.gradient_accumulation",
        "large_batch.gradient_accumulation",
        "large_batch.gradient_accumulation:micro_batches=8",
    ]
    parts = [candidate.parts for candidate in (search.look_at_singles(), *search.combinations())[1:]]
    assert {*parts} == {1, 2, 4, 8}


def test_footprints_between_micro_batches_are_interpolated() -> None:
    counts: list[int] = []

    def noted(run):  # type: ignore[no-untyped-def]
        counts.extend(t.micro_batches for t in run.techniques if t.name == "large_batch.gradient_accumulation")
        return formula(run)

    search = searching(2000.0, Numerics.ROUNDING, count=noted)
    search.look_at_singles()
    assert counts == [BATCH] and {option.parts for option in search.interpolated} == {2, 4}
    for option in [*search.interpolated]:
        interpolated = search.singles[option]
        assert search.alone(option) == search.counted((option,))
        for name in ("activations", "optimizer", "flops"):
            assert getattr(interpolated, name) == pytest.approx(getattr(search.singles[option], name))
    assert not search.interpolated


def test_refused_micro_batches_disable_interpolation() -> None:
    def refusing(run):  # type: ignore[no-untyped-def]
        if any(technique.micro_batches == BATCH for technique in run.techniques):
            raise RefusedError("large_batch.gradient_accumulation: not one by one")
        return formula(run)

    search = searching(2000.0, Numerics.ROUNDING, count=refusing)
    search.look_at_singles()
    assert not search.interpolated and {option.parts for option in search.singles if option.parts > 1} == {2, 4}


def test_much_slower_candidates_are_not_probed() -> None:
    run: list[PlanCandidate] = []

    def as_promised(candidate: PlanCandidate, bar: float) -> StepTiming:
        run.append(candidate)
        return by_expectation(candidate)

    search = searching(700.0, Numerics.ROUNDING, time=as_promised)
    search.finalists = 100
    best = search.run()
    assert len(run) > 1 and all(candidate.relative <= NEAR * best.relative for candidate in run)
    assert any(candidate.relative > NEAR * best.relative for candidate in search.combinations())


def test_probes_receive_the_bar_of_the_best_step() -> None:
    bars: list[float] = []

    def noted(candidate: PlanCandidate, bar: float) -> StepTiming:
        bars.append(bar)
        return by_expectation(candidate)

    searching(700.0, Numerics.ROUNDING, time=noted).run()
    assert bars[0] == math.inf and all(later <= sooner for sooner, later in pairwise(bars)) and bars[-1] < 10


def test_models_without_counted_flops_are_planned() -> None:
    """Only matrix products, convolutions and attention have FLOPs."""

    def counted(run: Run) -> Footprint:
        return replace(formula(run), flops=0.0)

    assert searching(700.0, count=counted, time=by_expectation).run().timing
    assert searching(700.0, count=counted).run().options
    with pytest.raises(InfeasibleError, match="no matrix products") as error:
        PlanRequest(flops=1e9).budget(PLANNER.recipe.budget, 0.0)
    assert error.value.fix


def test_plans_for_a_full_disk_end_after_some_counts() -> None:
    counts: list[Run] = []

    def counted(run: Run) -> Footprint:
        counts.append(run)
        return formula(run)

    full = "does not fit the disk: 9 MB of checkpoints"
    search = searching(2000.0, Numerics.DIFFERENT, count=counted, no_room=lambda candidate: full)
    with pytest.raises(InfeasibleError, match="does not fit the disk"):
        search.run()
    assert len(counts) < 3 * COUNTS + sum(map(len, search.options.values()))


def test_candidates_that_exceed_the_disk_are_dropped() -> None:
    def cramped(candidate: PlanCandidate) -> str:
        return "" if "optimizer_state" in candidate.label else "does not fit the disk: 9 MB of checkpoints"

    assert "optimizer_state" in searching(2000.0, Numerics.DIFFERENT, no_room=cramped).run().label
    with pytest.raises(
        InfeasibleError, match="the counted candidate does not fit the disk: 9 MB of checkpoints"
    ) as error:
        searching(2000.0, Numerics.EXACT, no_room=cramped).run()
    assert "--disk" in error.value.fix


def test_candidates_with_other_micro_batches_share_a_probe() -> None:
    run: list[PlanCandidate] = []

    def noted(candidate: PlanCandidate, bar: float) -> StepTiming:
        run.append(candidate)
        return by_expectation(candidate)

    search = searching(700.0, Numerics.ROUNDING, time=noted)
    search.run()
    assert len({search.kind(candidate) for candidate in run}) == len(run)
    shared = [candidate for candidate in search.tried if candidate.options not in {each.options for each in run}]
    for candidate in shared:  # with fewer tensors than the probed candidate
        assert candidate.timing is not None and candidate.footprint is not None
        assert candidate.timing.memory == pytest.approx(candidate.footprint.memory)
    assert shared


def test_budgets_have_whole_steps() -> None:
    assert PlanRequest(flops=1050.0).budget(Budget(steps=3), 100.0) == Budget(steps=10)
    assert PlanRequest(tokens=5.0, seconds=9.0).budget(Budget(steps=3), 100.0) == Budget(tokens=5.0)
    assert PlanRequest(seconds=9.0).budget(Budget(steps=3), 100.0) == Budget(seconds=9.0)
    assert PlanRequest().budget(Budget(steps=3), 100.0) == Budget(steps=3)
    with pytest.raises(InfeasibleError, match="is less than one step"):
        PlanRequest(flops=10.0).budget(Budget(steps=3), 100.0)


def holding(compiled: float, plain: float, run: list[PlanCandidate] | None = None) -> TimeOf:
    """Return a probe whose processes use additional MB: one number for compiled code, one for plain code."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        if run is not None:
            run.append(candidate)
        beyond = compiled if candidate.is_compiled else plain
        timing = by_expectation(candidate)
        return replace(timing, memory=timing.memory + beyond * MB)

    return time


def test_compiler_memory_counts_for_compiled_candidates_only() -> None:
    run: list[PlanCandidate] = []
    search = searching(700.0, base=(CATALOGUE["compile"](),), time=holding(500.0, 40.0, run))
    best = search.run()
    assert not best.is_compiled and run[0].is_compiled
    assert sum(candidate.is_compiled for candidate in run) <= PROBES // 2


def test_hopeless_compiled_candidates_leave_probes_to_others() -> None:
    run: list[PlanCandidate] = []
    surplus = iter(range(200, 2000, 200))

    def ever_more(candidate: PlanCandidate, bar: float) -> StepTiming:
        return holding(next(surplus) if candidate.is_compiled else 0.0, 0.0, run)(candidate, bar)

    search = searching(300.0, base=(CATALOGUE["compile"](),), time=ever_more)
    assert not search.run().is_compiled
    assert sum(candidate.is_compiled for candidate in run) <= PROBES // 2


def test_the_leanest_candidate_is_probed_before_an_error() -> None:
    def lighter_than_counted(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), memory=(60 if candidate.options else 900) * MB)

    assert searching(70.0, Numerics.EXACT, time=lighter_than_counted).run().options
    run: list[PlanCandidate] = []
    search = searching(120.0, Numerics.EXACT, time=holding(100.0, 100.0, run))
    with pytest.raises(
        InfeasibleError, match=r"the smallest that was run is memory.*: its process took \d+ MB"
    ) as error:
        search.run()
    estimates = {candidate.options: search.estimated(candidate.options) for candidate in search.combinations()}
    assert estimates[run[-1].options] == min(estimates.values())
    named = float(error.value.fix.split("MB")[0].split()[-1])
    assert searching(named, Numerics.EXACT, time=holding(100.0, 100.0)).run().options


def keeping(kept: float, given_back: float) -> TimeOf:
    """Return a probe whose processes use additional MB: one number if freed memory is kept, one if it is returned."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        gives_back = any(technique.limits_activation_bytes for technique in candidate.techniques)
        timing = by_expectation(candidate)
        return replace(timing, memory=timing.memory + (given_back if gives_back else kept) * MB)

    return time


@pytest.mark.parametrize("memory", [260.0, 330.0])
def test_freed_memory_counts_only_for_processes_that_keep_it(memory: float) -> None:
    """The candidate with the smallest tensors keeps freed memory, so its process is not the smallest."""
    search = searching(memory, Numerics.EXACT, time=keeping(kept=250.0, given_back=5.0))
    best = search.run()
    assert best.timing is not None and best.timing.memory * search.margin <= memory * MB
    assert any(technique.limits_activation_bytes for technique in best.techniques)


@settings(max_examples=25)
@given(st.floats(100, 900), st.floats(0, 400), st.floats(0, 40), st.booleans())
def test_plans_fit_and_named_memory_suffices(
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


def test_errors_at_the_time_limit_suggest_more_seconds() -> None:
    search = searching(100.0, Numerics.EXACT, time=keeping(500.0, 50.0), allowance=lambda step: 0.0)
    with pytest.raises(
        InfeasibleError, match=r"stopped after 0 s and skipped some options: no tried combination fits"
    ) as error:
        search.run()
    assert error.value.fix.startswith("--seconds 60; or --memory ")


def test_plans_without_probes_use_all_time_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, how = on_a_clock(monkeypatch, lambda candidate: 0.0)
    search = searching(math.inf, Numerics.EXACT, began=0.0, **(how | {"time": None}))
    allowed = 1.5 * sum(map(len, search.options.values()))
    search.allowance = lambda step: allowed
    search.run()
    assert not search.stopped and not search.refused


@pytest.mark.parametrize(
    ("seconds", "budget", "allowed"),
    [(None, 60.0, 60.0), (None, 3000.0, 600.0), (7.0, 60.0, 7.0), (7.0, 3000.0, 7.0)],
)
def test_time_limit_of_planning(seconds: float | None, budget: float, allowed: float) -> None:
    planner = replace(PLANNER, request=PlanRequest(seconds=budget), seconds=seconds)
    assert planner._allowance(1.0) == allowed


def test_process_memory_counts() -> None:
    assert searching(1000.0, process=300 * MB, time=by_expectation).run().options == searching(700.0).run().options
    run: list[PlanCandidate] = []

    def larger(candidate: PlanCandidate, bar: float) -> StepTiming:
        run.append(candidate)
        return replace(by_expectation(candidate), process=900 * MB)

    search = searching(1000.0, Numerics.EXACT, time=larger)
    with pytest.raises(InfeasibleError, match="900 MB of that before the model was built"):
        search.run()
    assert run and not run[0].options

    def as_large(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), process=300 * MB)

    best = searching(1000.0, Numerics.EXACT, time=as_large).run()
    assert best.timing and best.timing.process + best.timing.memory <= 1000 * MB


def test_candidates_without_free_memory_are_not_probed() -> None:
    run: list[PlanCandidate] = []
    with pytest.raises(InfeasibleError, match=r"the smallest needs about .*MB counted\)"):
        searching(60.0, Numerics.EXACT, time=holding(0.0, 0.0, run), free=60 * MB).run()
    assert not run


@pytest.mark.parametrize("fits", [True, False])
def test_plans_end_at_their_time_limit(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, how = on_a_clock(monkeypatch, lambda candidate: 12.0)
    memory = math.inf if fits else 420.0
    search = searching(memory, Numerics.DIFFERENT, allowance=lambda step: 40.0, began=0.0, **how)
    best = search.run()
    assert seconds[0] <= 40.0 + 12.0 and best.timing and search.stopped
    assert "not counted" in " ".join(search.refused.values())
    in_time = searching(memory, Numerics.DIFFERENT, began=seconds[0], **how)
    assert in_time.run().least_step <= best.least_step and not in_time.stopped


def timing_out(after: int) -> TimeOf:
    """Return a probe that reaches its time limit after some results."""
    results: list[StepTiming] = []

    def timed(candidate: PlanCandidate, bar: float) -> StepTiming:
        if len(results) == after:
            raise ProbeTimeout("its steps did not complete within 5 s")
        results.append(by_expectation(candidate))
        return results[-1]

    return timed


@pytest.mark.parametrize("memory", [math.inf, 420.0])
def test_plans_without_a_result_in_time_are_counted(memory: float) -> None:
    search = searching(memory, Numerics.DIFFERENT, time=timing_out(0))
    counted = searching(memory, Numerics.DIFFERENT, time=None)
    assert search.run().options == counted.run().options
    assert search.best().timing is None and "counted" in search.stopped
    assert {*search.misfits} == {*counted.misfits}


def test_candidates_that_time_out_later_are_left_out() -> None:
    search = searching(math.inf, Numerics.DIFFERENT, time=timing_out(2))
    assert search.run().timing and search.stopped
    assert all(candidate.timing for candidate in search.tried)
    assert "its steps did not complete within 5 s" in search.misfits.values()


def test_without_time_only_the_recipe_is_probed() -> None:
    run: list[PlanCandidate] = []
    search = searching(math.inf, Numerics.DIFFERENT, time=holding(0.0, 0.0, run), allowance=lambda step: 0.0)
    assert search.run().options == () and len(run) == 1 and search.stopped


def test_memory_below_an_empty_process_is_refused_at_once() -> None:
    def process(candidate: PlanCandidate, bar: float) -> StepTiming:
        return replace(by_expectation(candidate), process=900 * MB)

    for how in (dict(time=process), dict(process=900 * MB)):
        search = searching(5.0, **how)
        with pytest.raises(
            InfeasibleError, match="no combination fits in 5 MB: a process holds 900 MB before"
        ) as refusal:
            search.run()
        assert not search.singles and "seconds" not in str(refusal.value)
