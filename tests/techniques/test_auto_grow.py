"""Automatic growth: tried sizes, decisions, and their replay from the log."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_runs import advance, assert_same, plain_run, restored, snapshot, technique, tiny_model
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.backward import BackwardResult, plain_backward
from thrifty.core.batches import Batch, MappedSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.objective import Objective
from thrifty.core.state import TrainState, read_log
from thrifty.core.tensor_tracing import StepTrace
from thrifty.modeling.module_surgery import find_blocks
from thrifty.techniques.growth._flops_by_size import step_flops
from thrifty.techniques.growth.auto_grow import GROWN, AutoGrow, GrownStructure, GrowthSearchBackward, blocks_at

THREE = AutoGrow(stages=3, until=24, search=6, depths=3, lengths=2, multiple=4)
"""A run with the small model before step 8, a search of 6 steps, a middle stage, and the full size from step 16."""


def run_of(settings: AutoGrow = THREE, steps: int = 20, depth: int = 4, plain: BaseRun | None = None) -> Run:
    return compose(plain or plain_run(depth=depth), [settings, technique("optimizers.adamw")], steps)


class StepRecorder:
    """A record of the computed blocks and the tokens per example of each step."""

    def __init__(self, run: Run):
        self.run, self.state = run, run.start()
        self.steps: list[tuple[int, int]] = []

    def go(self, steps: int) -> "StepRecorder":
        for step in range(self.state.step, steps):
            seen: list[int] = []
            self.run.changes(self.state)
            assert self.state.model is not None
            hooks = [
                block.mlp.down.register_forward_hook(lambda m, args, output, seen=seen: seen.append(output.shape[1]))
                for block in find_blocks(self.state.model)[1]
            ]
            advance(self.run, self.state, step + 1)
            for hook in hooks:
                hook.remove()
            self.steps.append((len(seen), seen[0]))
        return self


def decisions(state: TrainState) -> list[tuple[int, str, list[list[float]]]]:
    return [(entry.step, entry.decision["why"], entry.decision["sizes"]) for entry in state.log]


@pytest.fixture(scope="module")
def recorder() -> StepRecorder:
    return StepRecorder(run_of()).go(20)


def test_a_search_trains_all_sizes_in_turn(recorder: StepRecorder) -> None:
    assert recorder.steps[:8] == [(2, 8)] * 8
    assert recorder.steps[8:14] == [(4, 16), (4, 8), (3, 16), (3, 8), (2, 16), (2, 8)]
    assert len(set(recorder.steps[14:16])) == 1 and recorder.steps[14] in recorder.steps[8:14]
    assert recorder.steps[16:] == [(4, 16)] * 4


def test_the_log_has_decisions_with_their_evidence(recorder: StepRecorder) -> None:
    small, search, chosen, *rest = recorder.state.log
    assert [entry.step for entry in (small, search, chosen)] == [0, 8, 14]
    actual = chosen.decision
    assert actual["tried"] == search.decision["sizes"] and len(actual["losses"]) == len(actual["times"]) == 6
    worth = [loss * time ** actual["weight"] for loss, time in zip(actual["losses"], actual["times"], strict=True)]
    assert actual["sizes"] == [actual["tried"][worth.index(min(worth))]]
    assert [entry.decision["sizes"] for entry in rest] in ([], [[[1.0, 1.0]]])


@pytest.mark.parametrize("at", [8, 11, 14])
def test_resume_replays_logged_decisions(recorder: StepRecorder, at: int) -> None:
    run = run_of()
    state = run.start()
    advance(run, state, at)
    saved = snapshot(state)
    again = run_of()
    resumed = restored(again, saved)
    assert [entry for entry in resumed.log] == [entry for entry in recorder.state.log if entry.step < at]
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(recorder.state))


def test_a_logged_decision_is_not_repeated() -> None:
    run = run_of()
    state = run.start()
    advance(run, state, 15)
    scalars = state.scalars()
    for entry in scalars["log"]:
        if "losses" in entry["decision"]:
            entry["decision"] = {"why": "said so", "sizes": [[0.75, 0.5]]}
    other = run.init_state(read_log(scalars))
    assert other.model is not None
    assert len(find_blocks(other.model)[1]) == 3 and GROWN.of(other.model).sizes == ((0.75, 0.5),)


def test_added_blocks_start_from_the_average_of_the_weights() -> None:
    run = run_of(AutoGrow(stages=2, until=8, search=0, momentum=0.5))
    state = run.start()
    means: dict[str, Tensor] = {}
    trained: list[dict[str, Tensor]] = []
    for step in range(4):
        advance(run, state, step + 1)
        assert state.model is not None
        trained.append({name: p.detach().clone() for name, p in state.model.named_parameters()})
    for age, values in enumerate(trained):
        kept = min(0.5, (1 + age) / (10 + age)) if age else 0.0
        means = {name: kept * means.get(name, 0.0) + (1 - kept) * value for name, value in values.items()}
    run.changes(state)
    assert state.model is not None and len(find_blocks(state.model)[1]) == 4
    for name, parameter in state.model.named_parameters():
        old = name.replace("blocks.2.", "blocks.0.").replace("blocks.3.", "blocks.1.")
        expected = trained[-1][name] if old == name else means[old]
        torch.testing.assert_close(parameter.detach(), expected)
        assert old == name or not torch.equal(expected, trained[-1][old])


def test_without_a_search_the_model_doubles_at_each_boundary() -> None:
    run = run_of(AutoGrow(stages=4, until=8, search=0, start=0.25), 8, depth=8)
    state = run.start()
    advance(run, state)
    assert [(step, sizes) for step, _, sizes in decisions(state)] == [
        (0, [[0.25, 0.25]]),
        (2, [[0.5, 0.5]]),
        (4, [[1.0, 1.0]]),
    ]


def test_a_run_of_fewer_steps_than_stages_is_full_from_the_start() -> None:
    state = run_of(AutoGrow(stages=4, until=1, search=0), 2).start()
    assert state.model is not None and len(find_blocks(state.model)[1]) == 4
    assert [sizes for _, _, sizes in decisions(state)] == [[[1.0, 1.0]]]


def test_the_final_model_has_the_full_size() -> None:
    run = run_of(AutoGrow(stages=3, until=9, search=2, depths=2, lengths=1, weight=50.0), 8)
    state = run.start()
    advance(run, state, 6)
    assert state.model is not None
    assert decisions(state)[-1][2] == [[0.5, 1.0]]  # a large weight of time makes the smallest size best
    assert len(find_blocks(state.model)[1]) == 2
    advance(run, state)
    assert len(find_blocks(state.model)[1]) == 4 and decisions(state)[-1][2] == [[1.0, 1.0]]


def test_examples_that_cannot_be_shortened_grow_in_depth() -> None:
    plain = plain_run()
    source = MappedSource(
        plain.source, lambda step, batch: replace(batch, fields={**batch.fields, "more": batch["key"]})
    )
    run = run_of(plain=replace(plain, source=source))
    state = run.start()
    advance(run, state, 15)
    chosen = next(entry.decision for entry in state.log if "losses" in entry.decision)
    assert chosen["tried"] == [[1.0, 1.0], [0.75, 1.0], [0.5, 1.0]]
    assert chosen["times"] == [step_flops(tiny_model(), {"blocks": depth}, 16) for depth in (4, 3, 2)]


def test_lengths_are_tried_if_positions_are_unknown() -> None:
    run = run_of()
    state = run.start()
    advance(run, state, 7)
    state.techniques["growth.auto_grow"]["positions"].zero_()  # as in a run that counts them only in a search
    advance(run, state, 9)
    assert {length for _, length in decisions(state)[-1][2]} == {1.0, 0.5}


def test_examples_without_positions_cannot_be_shortened() -> None:
    model, search = tiny_model(), GrowthSearchBackward(lambda *_: BackwardResult(torch.tensor(1.0)), AutoGrow())
    GROWN.set(model, GrownStructure(0, ((1.0, 1.0),), {}))
    search(model, plain_run().objective, Batch({"x": torch.zeros(2, 3)}, torch.ones(2)))
    assert search.state["positions"] < 0


def test_losses_of_a_search_are_divided_by_their_parts() -> None:
    def backward(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        return BackwardResult(torch.tensor(6.0), parts=torch.tensor(12.0))

    model, plain = tiny_model(), plain_run(batch=4)
    GROWN.set(model, GrownStructure(0, ((1.0, 1.0), (0.5, 1.0)), {"blocks": 4}))
    search = GrowthSearchBackward(backward, AutoGrow(depths=2, lengths=1))
    search(model, plain.objective, plain.source.at(0))
    assert search.state["loss"].tolist() == [2.0, 0.0]


def test_a_model_of_one_block_grows_in_length_with_a_note() -> None:
    run = run_of(depth=1)
    run.start()
    assert "each stack has one block, so only the size of examples grows" in run.notes["growth.auto_grow"]


def test_measured_times_are_seconds() -> None:
    run = run_of(AutoGrow(stages=3, until=12, search=2, depths=2, lengths=1, time_source="measured"), 7)
    state = run.start()
    advance(run, state)
    times = next(entry.decision["times"] for entry in state.log if "times" in entry.decision)
    assert len(times) == 2 and all(1e-5 < time < 10 for time in times)


def traced_flops(depth: int, length: int) -> float:
    model = tiny_model(style="gpt")
    del model.blocks[depth:]
    batch = plain_run().source.at(0)
    tokens = batch["tokens"][:, : length + 1]
    with StepTrace() as trace:
        plain_backward(model, plain_run().objective, type(batch)({"tokens": tokens}, batch.weight))
    return trace.flops / len(batch)


def test_counted_costs_rise_like_a_traced_step() -> None:
    model = tiny_model(style="gpt")
    sizes = [(4, 16), (4, 8), (2, 16), (2, 8)]
    counted = [step_flops(model, {"blocks": depth}, length) for depth, length in sizes]
    traced = [traced_flops(depth, length) for depth, length in sizes]
    ratios = [mine / theirs for mine, theirs in zip(counted, traced, strict=True)]
    assert max(ratios) < 1.03 * min(ratios)


def test_evaluation_uses_all_current_blocks_and_whole_texts() -> None:
    run = run_of()
    state = run.start()
    advance(run, state, 10)  # during the search
    assert state.model is not None
    calls: list[Sequence[int]] = []
    for block in find_blocks(state.model)[1]:
        block.mlp.down.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    with torch.no_grad():
        run.eval_objective.predict(state.model.eval(), run.plain.source.at(0))
    assert [shape[1] for shape in calls] == [16] * 4


def test_impossible_settings_and_combinations_are_refused() -> None:
    with pytest.raises(UsageError, match="is not shorter than a stage"):
        AutoGrow(stages=4, search=0.3)
    for until in (8, 9):  # the next stage would begin before a selection
        with pytest.raises(UsageError, match="search '2' is not shorter than a stage of 2"):
            AutoGrow(stages=4, until=until, search=2)
    for other, reason in (
        ("sparsity.rigl", "is not masked"),
        ("adapters.lora", "keep frozen"),
        ("parallelism.pipeline", "no stage of a pipeline"),
        ("memory.activation_budget", "a search skips blocks"),
    ):
        with pytest.raises(UsageError, match=reason):
            compose(plain_run(), [AutoGrow(), technique(other), technique("optimizers.adamw")], 4)


def test_a_stack_keeps_at_least_one_block() -> None:
    assert [blocks_at(share, 4) for share in (0.01, 0.5, 0.6, 1.0)] == [1, 2, 2, 4]


def test_blocks_without_plain_linear_layers_are_refused() -> None:
    norm = nn.utils.parametrizations.weight_norm
    blocks = nn.ModuleList(nn.Sequential(norm(nn.Linear(4, 4)), nn.ReLU()) for _ in range(2))
    with pytest.raises(RefusedError, match="no linear layer with a weight, so"):
        step_flops(nn.ModuleDict({"blocks": blocks}), {"blocks": 2}, 8)
