"""Base classes of techniques that replace attention cores at a step of the run, after calibration if required.

A *site* is one attention module of the model. Its *core* maps queries, keys and values to the output of attention. A
run has up to two phases, unchanged attention ("plain") and replaced attention ("chosen"). Both phases are in the run's
log. New cores are built from the settings and the calibrated values. Calibrated values are JSON numbers, equal on all
ranks and after a resume.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.optimizer_steps import count_steps, finished_steps
from thrifty.core.randomness import preserved_draws
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.core.tensor_tracing import untraced
from thrifty.modeling.attention_cores import (
    ATTENTION_SITES,
    AttentionCore,
    AttentionSite,
    SwappableCore,
    refuse_changed_cores,
)
from thrifty.modeling.attention_sites import find_attention_sites

PLAIN, CHOSEN = "plain", "chosen"
PHASE: ModuleNote[Mapping[str, Any]] = ModuleNote("attention_phase")
"""Current phase and calibrated values of a model."""
SWAPPABLE_CORES: ModuleNote[dict[str, SwappableCore]] = ModuleNote("swappable_cores")
"""Attention cores by module name; calibration observes their inputs."""


def decided_phase(model: nn.Module | None) -> Mapping[str, Any]:
    return PHASE.get(model) or {"phase": CHOSEN}


class ReplacedAttention(Technique):
    """A technique that replaces the attention cores at step `from_step`. A subclass defines the new core in `core`."""

    stage, numerics = Stage.ATTENTION, Numerics.DIFFERENT
    claims = frozenset({Claim.ATTENTION_CORE})

    from_step: StepOrFraction = 0
    """First step with the replaced attention. Earlier steps use the model's own attention."""
    export_plain: bool = False
    """Allow export with the model's own attention, although its outputs differ from the trained outputs."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"changes"} if self.from_step else {"changes", "hook_steps"})

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        """Return the new core of an attention module. `calibration` has the calibrated values by module name."""
        raise NotImplementedError

    @property
    def start(self) -> int:
        return int(self.from_step)

    def calibrated_values(self, state: TrainState) -> dict[str, Any]:
        """Return the calibrated values as JSON values, by name of the attention module."""
        return {}

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        decided = state.logged_decision(self.name, step)
        if decided is None and step == self.start:
            decided = {"phase": CHOSEN, "found": self.calibrated_values(state)}
        elif decided is None and step == 0:
            decided = {"phase": PLAIN}
        if decided is None:
            return None
        reason = "attention is plain" if decided["phase"] == PLAIN else "attention cores are replaced"
        return StructuralChange(reason, decided, partial(_mark, decided=decided))

    def model(self, model: nn.Module) -> nn.Module:
        sites, decided = find_attention_sites(model), decided_phase(model)
        refuse_changed_cores(self.name, sites)
        ATTENTION_SITES.set(model, sites)
        for site in sites:
            if decided["phase"] == CHOSEN:
                site.put(self.core(site, decided.get("found", {})))
        phase = "replaced" if decided["phase"] == CHOSEN else f"plain before step {self.start}"
        add_note(f"{len(sites)} attention cores, {phase}")
        return model

    def change_forward(self, model: nn.Module) -> None:
        if self.start:
            PHASE.set(model, {"phase": PLAIN})

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        def replace_or_calibrate(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if decided_phase(model)["phase"] == CHOSEN:
                return
            if (step := finished_steps(optimizer)) >= self.start:
                values = self.calibrated_values(TrainState(step, model))
                refuse_changed_cores(self.name, ATTENTION_SITES.of(model), SWAPPABLE_CORES.get(model) or {})
                for site in ATTENTION_SITES.of(model):
                    site.take_away()
                self.model(_mark(model, {"phase": CHOSEN, "found": values}))
            elif model.training and torch.is_grad_enabled():
                self.before_pass(model, step, args, kwargs)

        if self.start:
            count_steps(optimizer)
            model.register_forward_pre_hook(replace_or_calibrate, with_kwargs=True)

    def before_pass(self, model: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run at the start of each training forward pass until `from_step`. The base class does nothing."""

    def finish(self, model: nn.Module) -> nn.Module:
        phase = decided_phase(model)["phase"]
        if phase == CHOSEN:
            self.refuse_export()
        for site in ATTENTION_SITES.remove(model):
            site.take_away()
        return model

    def refuse_export(self) -> None:
        """Raise RefusedError unless `export_plain` is set."""
        if not self.export_plain:
            raise RefusedError(
                f"{self.name}: the plain architecture attends to all tokens, so its outputs would differ with these "
                "weights",
                fix=f"--set techniques.{self.name}.export_plain=true, to export the model anyway",
            )

    def holds(self, state: TrainState) -> None:
        phases = [entry.decision["phase"] for entry in state.log if entry.technique == self.name]
        expected = [PLAIN, CHOSEN] if self.start else [CHOSEN]
        if state.step < self.start:
            expected = [PLAIN]
        # the change takes effect with the first pass of the step
        if phases != expected and not (state.step == self.start and phases == [PLAIN]):
            raise IntegrityError(f"{self.name}: after {state.step} steps the log has phases {phases}, not {expected}")


def _mark(model: nn.Module, decided: Mapping[str, Any]) -> nn.Module:
    PHASE.set(model, decided)
    return model


class CalibrationBackward:
    """A backward pass that first calibrates on some examples, in the last steps before attention is replaced.

    `state` counts calls. Buffers of the attention modules accumulate the measured values.
    """

    def __init__(self, inner: Backward, settings: "CalibratedAttention"):
        self.inner, self.settings = inner, settings
        # readable while only shapes are traced, unlike torch.zeros
        self.state = {"calls": torch.tensor(0)}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        calls = int(self.state["calls"])
        self.state["calls"].add_(1)
        if self.settings.start - self.settings.steps <= calls < self.settings.start:
            with untraced():
                examples = batch.rows(0, self.settings.examples)
                self.settings.calibrate(model, partial(objective.predict, model, examples))
        return self.inner(model, objective, batch)


class CalibratedAttention(ReplacedAttention):
    """A technique whose core depends on values measured on the model during training.

    A subclass defines `measure`, which returns the values of one call, and `settle`, which computes the logged result
    from their means.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.DEPTH: "each block is calibrated once, and blocks added later are not",
        Claim.PIPELINE_PARALLELISM: "the whole model is calibrated in one pass",
    }

    from_step: StepOrFraction = 0.1
    """First step with the replaced attention. At least one step uses the model's own attention."""
    steps: Positive = 4
    """Number of calibration steps, which are the last steps before attention is replaced."""
    examples: Positive = 8
    """Maximum number of calibration examples per step and rank."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"changes", "backward"})

    @property
    def start(self) -> int:
        return max(int(self.from_step), 1)

    def measure(self, site: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the values (n,) that are measured in one call. They are averaged over calls and ranks.

        q is (b, h, t, k), k is (b, g, t, k), and the bias of the scores is (b or 1, h or 1, t, t).
        """
        raise NotImplementedError

    def count(self, model: nn.Module, site: AttentionSite) -> int:
        """Return n, the number of values that `measure` returns."""
        return 1

    def settle(self, site: AttentionSite, means: Tensor) -> Any:
        """Return the result that is logged, as JSON values. `means` (n,) are the averages of the measured values."""
        return means.tolist()

    def model(self, model: nn.Module) -> nn.Module:
        model = super().model(model)
        cores = SWAPPABLE_CORES.set(model, {})
        if decided_phase(model)["phase"] == PLAIN:
            for site in ATTENTION_SITES.of(model):
                device = next(site.module.parameters()).device
                count = self.count(model, site)
                site.module.register_buffer("calibration", torch.zeros(count + 1, dtype=torch.float64, device=device))
                cores[site.name] = SwappableCore(site.plain)
                site.put(cores[site.name])
        return model

    def backward(self, backward: Backward) -> Backward:
        return CalibrationBackward(backward, self)

    @torch.no_grad()
    def calibrate(self, model: nn.Module, forward: Callable[[], object]) -> None:
        """Run `forward` without dropout, and add the measured values, averaged over ranks, to the modules' buffers."""
        sites, cores = ATTENTION_SITES.of(model), SWAPPABLE_CORES.of(model)
        if not cores:  # cores are already replaced; only FLOPs are counted
            return
        values: dict[str, list[Tensor]] = {site.name: [] for site in sites}
        for site in sites:
            cores[site.name].watch = partial(self._measure_call, site, values[site.name])
        training = model.training
        try:
            with preserved_draws(model.parameters()), torch.compiler.set_stance("force_eager"):
                model.eval()
                forward()
        finally:
            model.train(training)
            for site in sites:
                cores[site.name].watch = None
        for site in sites:
            if values[site.name]:
                mean = mean_over_ranks(torch.stack(values[site.name]).double().mean(0))
                site.module.calibration += torch.cat((mean.to(site.module.calibration), mean.new_ones(1)))

    def _measure_call(self, site: AttentionSite, values: list[Tensor], *call: Tensor | None) -> None:
        values.append(self.measure(site, *call).flatten())  # type: ignore[arg-type]

    def before_pass(self, model: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        site = ATTENTION_SITES.of(model)[0].module
        done = int(site.calibration[-1])  # also counts steps before a resume
        first = max(self.start - self.steps, 0)
        if step < first or step - first < done:
            return
        count = next((len(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.ndim), 0)

        def first_rows(value: Any) -> Any:
            is_rows = isinstance(value, Tensor) and value.ndim and len(value) == count
            return value[: self.examples] if is_rows else value

        examples = tree_map(first_rows, (args, kwargs))
        self.calibrate(model, lambda: model(*examples[0], **examples[1]))

    def calibrated_values(self, state: TrainState) -> dict[str, Any]:
        if state.model is None:
            return {}
        calibration = {}
        for site in ATTENTION_SITES.of(state.model):
            sums, count = site.module.calibration[:-1], site.module.calibration[-1]
            if not count:
                raise IntegrityError(f"{self.name}: {site.name} was not called during calibration")
            calibration[site.name] = self.settle(site, sums / count)
        return calibration

    def finish(self, model: nn.Module) -> nn.Module:
        model = super().finish(model)
        for module in model.modules():
            if "calibration" in module._buffers:
                del module.calibration
        return model
