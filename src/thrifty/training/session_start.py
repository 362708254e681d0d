"""Start of a training session: counts, measurements and files of a run, then its steps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thrifty.composition.compose import Run, compose
from thrifty.composition.explain import Explanation, explain, resident_bytes
from thrifty.core.batch_norms import batch_norms, explain_divided_norms, names_of_dividing
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, ThriftyError, for_reader, reason_of, spelled
from thrifty.core.eval_mode import eval_mode
from thrifty.core.footprint import Footprint
from thrifty.core.kept_results import keep, read_kept
from thrifty.core.mesh import AXES, axis
from thrifty.core.old_names import rename_origins, rename_techniques
from thrifty.core.out_of_memory import OutOfMemory, explain_out_of_memory, is_out_of_memory
from thrifty.core.ranks import rank, ranks
from thrifty.core.recipe import Recipe
from thrifty.core.stages import Stage
from thrifty.core.state import StructureLogEntry, TrainState
from thrifty.data.example_previews import selection
from thrifty.data.run_metadata import tokenizer_settings
from thrifty.machine.machine_info import peak_flops
from thrifty.objectives.user_loss import UserLoss, explain_parts
from thrifty.recipes.memory_savers import leaner_start
from thrifty.recipes.recipe_toml import recipe_to_data, write_recipe
from thrifty.training import run_ledger
from thrifty.training.determinism import unordered_kernels
from thrifty.training.kept_counts import path_of_counts
from thrifty.training.memory_meter import MemoryMeter, kept_bytes, set_freed_memory_policy
from thrifty.training.progress_display import ProgressDisplay
from thrifty.training.rank_sync import process_group_sync
from thrifty.training.required_room import refuse_little_disk, refuse_little_memory
from thrifty.training.run_environment import environment
from thrifty.training.run_folder import RunFolder
from thrifty.training.run_setup import PreparedRun
from thrifty.training.session_steps import session_steps
from thrifty.training.time_budget import RunLength, TimeBudget
from thrifty.training.train_session import Observer, Steps, TrainSession

MACHINE = ("cpu", "cores", "device", "gpu", "ranks", "mesh", "torch", "thrifty")
"""Entries of environment.json. If one of them has changed, a resumed run does not reuse the counts and measurements
from its start."""
EXAMPLES_OF_A_MEAN = 8
"""Number of held-out examples for the check that a mean loss is the mean over its parts."""


def counted_facts(prepared: PreparedRun) -> dict[str, Any]:
    """Count a step of a run and measure the peak speed of this machine. Return JSON values for `train_steps`."""
    run = prepared.run
    peak = {"peak_flops_per_second": _peak(prepared.recipe, run.device)}
    return {"environment": _machine(run), "explanation": explain_run(prepared).as_dict({}), "summary": peak}


def explain_run(prepared: PreparedRun) -> Explanation:
    """Return the footprints of a run. Raise RefusedError for a model of the user that the recipe's objective cannot
    call."""
    try:
        return explain(prepared.run, refuses_foreign=True)
    except Exception as error:
        is_called_by_name = prepared.recipe.objects.model is not None and prepared.run.plain.objective.learns_from
        if not is_called_by_name or isinstance(error, ThriftyError) or is_out_of_memory(error):
            raise
        name = prepared.recipe.objective.name
        raise RefusedError(
            f"the objective {name} cannot call {prepared.recipe.model.build}: {reason_of(error)}",
            fix=spelled("--loss package.module:function", "pass loss=, a function of (model, batch)"),
        ) from error


def run_session(
    prepared: PreparedRun,
    folder: RunFolder,
    display: ProgressDisplay,
    origins: Mapping[str, str],
    observers: Sequence[Observer],
    log: list[StructureLogEntry] | None = None,
    fill: Callable[[TrainState], list[str]] = lambda state: [],
    lengths: Sequence[RunLength] = (),
    recorded: Mapping[int, Mapping[str, Any]] | None = None,
    counted: Mapping[str, Any] | None = None,
) -> Steps:
    """Build the state, write the files that describe the run, and train. `fill` loads values and returns notices.
    `lengths` are the numbers of steps of a resumed run so far, and `recorded` the changes of this number that were
    recorded from its checkpoint on."""
    recipe, run, data = prepared.recipe, prepared.run, prepared.data
    here = _machine(run)
    before = {name: stored_json(folder, name) for name in ("origins", "environment", "explanation", "summary")}
    before |= {"origins": rename_origins(before["origins"]), "explanation": rename_techniques(before["explanation"])}
    kept = path_of_counts(prepared, recipe_to_data(recipe))
    reused = counted or (read_kept(kept) if kept else {})
    known = next((facts for facts in (before, reused) if _are_reusable(facts, here, run)), None)
    if known is None:
        display.phase("predicting memory and work")
    explanation = explain_run(prepared) if known is None else None
    if known is None:
        display.phase("measuring the peak speed of this machine")
    peak = _peak(recipe, run.device) if known is None else known["summary"]["peak_flops_per_second"]
    import_module("torch._dynamo")  # the first step imports it; its memory belongs to the process
    meter = MemoryMeter(run.device)
    footprint = explanation.footprint.as_dict() if explanation else known["explanation"]["footprint"]
    predicted = footprint["memory"]
    process_group_sync().run_first(lambda: refuse_little_disk(recipe, run, Footprint.from_dict(footprint), folder.path))
    remedy = partial(_remedy, prepared, folder)
    display.phase("building the model")
    try:
        refuse_little_memory(run, predicted, remedy)
        with explain_out_of_memory(meter.process + predicted, remedy):
            state = run.start() if log is None else run.init_state(log)
            source = run.plain.source
            assert state.model is not None
            divided = explain_divided_norms(batch_norms(state.model.train()), run.techniques)
            texts = [folder.notice, *source.notices, source.unrepeatable, divided, unordered_kernels(run.device)]
            notices = [*fill(state), *_lost_updates(run, state), *_partly_judged(prepared), *filter(None, texts)]
            notices += _divided_mean(prepared, state.model)
    except OutOfMemory as error:
        if rank() == 0 and not before["summary"] and log is None:
            folder.write_text("recipe.toml", write_recipe(recipe))
            summary = {"status": "stopped", "exit_code": error.exit_code, "steps": 0, "error": str(error)}
            folder.write_json("summary", summary)
        raise
    for technique in run.techniques if log is None else ():
        if technique.stage is Stage.ADAPTERS:
            display.say(f"{technique.name}: {'; '.join(run.notes.get(technique.name, ()))}")
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    if log is None and ranks() == 1:
        copied = _about_copy(run) if recipe.model.weights == "given" else ""
        display.say(f"model {_name_of_model(recipe)}: {parameters:,} parameters{copied}")
    explained = explanation.as_dict(run.notes) if explanation else known["explanation"]
    if known is reused:
        own = [{"settings": asdict(each), "touched": run.notes.get(each.name, [])} for each in run.techniques]
        rows = zip(explained["techniques"], own, strict=True)
        explained = {**explained, "techniques": [row | settings for row, settings in rows]}
    if known is None and kept:
        keep(kept, {"environment": here, "explanation": explained, "summary": {"peak_flops_per_second": peak}})
    facts = {
        "folder": str(folder.path),
        **prepared.facts,
        **({"measured": list(run.eval_objective.metrics)} if run.eval_objective.metrics else {}),
        **({"unrepeatable": source.unrepeatable} if source.unrepeatable else {}),
        **({"budget_seconds": recipe.budget.seconds} if recipe.budget.seconds else {}),
        **({"parameters": parameters} if ranks() == 1 else {}),  # a rank may hold a part of the model
        **_peak_of_earlier_parts(before["summary"] if log is not None else {}, meter),
        "judge": recipe.evaluation.judge,
        "judged_examples": min(len(data.held_out), recipe.evaluation.examples),
        "predicted_memory": predicted,
        "kept_memory": kept_bytes(run.device, run.techniques, footprint["activations"]),
        "flops_per_step": explained["plain"]["flops"],
        "peak_flops_per_second": peak,
        "peak_format": str(matrix_type(recipe)).removeprefix("torch."),
    }
    if rank() == 0:
        first = {name: before["environment"][name] for name in ("command", "started") if name in before["environment"]}
        folder.write_text("recipe.toml", write_recipe(recipe))
        used = tuple(f"techniques.{technique.name}" for technique in recipe.techniques)
        own = {path: at for path, at in origins.items() if not path.startswith("techniques.") or path.startswith(used)}
        folder.write_json("origins", {**before["origins"], **own})
        folder.write_json("environment", here | first)
        folder.write_json("explanation", explained)
        metadata = data.metadata()
        for name, text in (tokenizer_settings(recipe, metadata) | metadata).items():
            folder.write_text(name, text)
        if run.source.selected_subset is not None:
            folder.write_json("selection", selection(data, run.source.selected_subset))
        for text in notices:
            folder.append({"kind": "notice", "step": state.step, "text": text})
        if recorded and state.step in recorded:
            folder.append(recorded[state.step])
    examples = list(data.held_out.batches(recipe.evaluation.examples, recipe.evaluation.batch or recipe.data.batch))
    resume_facts = {"recipe": recipe_to_data(recipe), "data": dict(data.identity)}
    session = TrainSession(
        resume_facts,
        recipe,
        run,
        examples,
        folder,
        facts,
        notices,
        display,
        remedy,
        data.pictures,
        observers,
        _time_budget(prepared, folder, state),
        list(lengths) or [RunLength(0, run.steps)],
        recorded or {},
    )
    with set_freed_memory_policy(run):
        summary = yield from session_steps(session, state, meter)
    if rank() == 0:
        run_ledger.record_run(folder.path, summary)
    return summary


def _time_budget(prepared: PreparedRun, folder: RunFolder, state: TrainState) -> TimeBudget | None:
    """Return the budget of a run in seconds."""
    budget, counters = prepared.recipe.budget, state.counters
    if budget.seconds is None:
        return None
    counters["starts"] = counters.get("starts", 0.0) + 1
    if any(technique.overrides("changes", "batches") for technique in prepared.run.techniques):
        counters.setdefault("final_step_seconds", prepared.step_seconds)

    def last_recorded() -> int:
        return max((each["step"] for each in folder.read_later_records(state.step) if state.step), default=0)

    def step_times() -> list[float]:
        steps = [record for record in folder.read_records() if record["kind"] == "step"]
        return [step["step_seconds"] for step in steps if step["step"] <= state.step]

    sync = process_group_sync()
    return TimeBudget(
        budget,
        prepared.began,
        counters.get("used_seconds", counters.get("seconds", 0.0)),
        counters.get("final_step_seconds", 0.0),
        sync.run_first(last_recorded),
        sync.run_first(step_times) if budget.counts == "training" else [],
        int(counters.get("starts", 1.0)),
    )


def _peak_of_earlier_parts(earlier: Mapping[str, Any], meter: MemoryMeter) -> dict[str, float]:
    """Return facts of the memory of a resumed run, so that its peak is the largest of all its processes."""
    process, peak = (earlier.get(f"{name}_memory") for name in ("process", "peak"))
    if not (isinstance(process, int | float) and isinstance(peak, int | float)):
        return {}
    largest = max(process, meter.process)
    return {"process_memory": largest, "peak_memory": process + peak - largest}


def _name_of_model(recipe: Recipe) -> str:
    model = recipe.model
    return model.build or (Path(model.folder).name if model.folder else model.preset)


def _about_copy(run: Run) -> str:
    rates = [getattr(one, "lr", None) for one in run.techniques if Claim.OPTIMIZER in one.claims]
    rate = f" at lr={rates[0]:g}" if rates and isinstance(rates[0], float) else ""
    return f"; a copy of the passed module is trained from its weights{rate}: run.model"


def _partly_judged(prepared: PreparedRun) -> list[str]:
    """Return a notice if an evaluation uses only some held-out examples, for the user's data or if it measures shares
    of examples, such as the accuracy."""
    judged, there = prepared.recipe.evaluation.examples, len(prepared.data.held_out)
    is_rough = prepared.recipe.objects.data is not None or prepared.run.eval_objective.metrics
    if not is_rough or there <= judged:
        return []
    more = for_reader(f"--set evaluation.examples={there}")
    return [f"{judged:,} of {there:,} held-out examples are judged; {more} judges all"]


def _lost_updates(run: Run, state: TrainState) -> list[str]:
    """Return a notice if trained weights are in 16 bits and no technique compensates for their rounding."""
    assert state.model is not None
    formats = {p.dtype for p in state.model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    if not formats or any(Claim.PRECISION in one.claims and one.overrides("update") for one in run.techniques):
        return []
    named = " and ".join(sorted(str(each).removeprefix("torch.") for each in formats))
    return [
        f"the model's trained weights are in {named}: rounding loses small updates; pass the model in float32 "
        "(model.float()), with precision.mixed for 16-bit products, or with precision.bfloat16_weights"
    ]


def _divided_mean(prepared: PreparedRun, model: nn.Module) -> list[str]:
    """Return a notice if techniques split batches whose mean loss is not the mean over its parts."""
    run, objective = prepared.run, prepared.run.plain.objective
    dividing = names_of_dividing(run.techniques)
    is_whole = not any(Claim.PIPELINE_PARALLELISM in one.claims for one in run.techniques)
    if not (dividing and is_whole and isinstance(objective, UserLoss)) or objective.joint:
        return []
    batch = next(iter(prepared.data.held_out.batches(EXAMPLES_OF_A_MEAN, EXAMPLES_OF_A_MEAN))).to(run.device)
    if len(batch) < EXAMPLES_OF_A_MEAN:
        return []
    tolerance = 2e-5 if matrix_type(prepared.recipe) == torch.float32 else 1e-3
    with eval_mode(model), torch.compiler.set_stance("force_eager"):
        difference = explain_parts(run.eval_objective, model, batch, tolerance)
    return [f"{dividing}: {difference}"] if difference else []


def _remedy(prepared: PreparedRun, folder: RunFolder, memory: float) -> str:
    """Return the fix for a run that must fit into `memory` bytes. Each suggested technique is first composed with the
    run on this rank, to check that no error occurs."""
    run = prepared.run

    def check(recipe: Recipe) -> None:
        leaner = compose(run.plain, recipe.techniques, run.steps, run.device)
        if ranks() == 1:
            resident_bytes(leaner)

    return leaner_start(prepared.recipe, folder.path, memory, check)


def stored_json(folder: RunFolder, name: str) -> dict[str, Any]:
    """Return the content of `<name>.json` from an earlier part of the run, the same on every rank; {} if there is
    none."""

    def read() -> dict[str, Any]:
        with suppress(IntegrityError):
            if isinstance(value := folder.read_json(name), dict):
                return value
        return {}

    return process_group_sync().run_first(read)


def _machine(run: Run) -> dict[str, Any]:
    """Return the environment of a run, with its ranks."""
    return environment(str(run.device)) | {"ranks": ranks(), "mesh": {name: axis(name).size for name in AXES}}


def _are_reusable(facts: Mapping[str, Any], here: Mapping[str, Any], run: Run) -> bool:
    """Return True if the facts are of this machine, of the run's techniques, and contain all values that a run
    reuses."""
    try:
        names = [row["name"] for row in facts["explanation"]["techniques"]]
        numbers = (
            facts["explanation"]["footprint"]["memory"],
            facts["explanation"]["plain"]["flops"],
            facts["summary"]["peak_flops_per_second"],
        )
    except (KeyError, TypeError):
        return False
    is_complete = all(isinstance(number, int | float) for number in numbers)
    are_of_run = names == [technique.name for technique in run.techniques]
    return is_complete and are_of_run and all(facts["environment"].get(name) == here.get(name) for name in MACHINE)


def _peak(recipe: Recipe, device: torch.device) -> float:
    """Return the measured FLOP/s of matmuls over all ranks, in the run's dtype."""
    return peak_flops(device, matrix_type(recipe)) * ranks()


def matrix_type(recipe: Recipe) -> torch.dtype:
    """Return the dtype of the run's matmuls. The fraction of peak refers to this dtype."""
    formats = (technique.number_format for technique in recipe.techniques)
    return getattr(torch, next((name for name in formats if name != "float32"), "float32"))
