"""What techniques that replace attention cores have in common: plain attention first where the paper starts with it,
calibration in passes of their own, and a change at a moment of the run, with what was found in its log.

A run has up to two phases, both in the log. In the second, cores are built of the settings and of what calibration
found, which are plain numbers: the same on all ranks, and the same again when the run is resumed.
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
from thrifty.modeling.attention_sites import (
    ATTENTION_SITES,
    AttentionCore,
    AttentionSite,
    SwappableCore,
    find_attention_sites,
)

PLAIN, CHOSEN = "plain", "chosen"
PHASE: ModuleNote[Mapping[str, Any]] = ModuleNote("attention_phase")
"""On a model: the phase that is decided, and what calibration found."""
SWAPPABLE_CORES: ModuleNote[dict[str, SwappableCore]] = ModuleNote("swappable_cores")
"""On a model: the cores that are watched before they are replaced, by the name of their site."""


def decided_phase(model: nn.Module | None) -> Mapping[str, Any]:
    return PHASE.get(model) or {"phase": CHOSEN}


class ReplacedAttention(Technique):
    """Another attention core from `from_step` on. A subclass says which, in `core`."""

    stage, numerics = Stage.ATTENTION, Numerics.DIFFERENT
    claims = frozenset({Claim.ATTENTION_CORE})

    from_step: StepOrFraction = 0
    """Attention is the plain one up to here."""
    export_plain: bool = False
    """Whether the trained weights may be exported as a model with plain attention, which computes something else."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"changes"} if self.from_step else {"changes", "hook_steps"})

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        """What is to compute the attention there; `calibration` is what was calibrated, by the names of places."""
        raise NotImplementedError

    @property
    def start(self) -> int:
        """The step before which cores are replaced."""
        return int(self.from_step)

    def found(self, state: TrainState) -> dict[str, Any]:
        """What calibration came to, as plain JSON by the names of places."""
        return {}

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        decided = state.logged_decision(self.name, step)
        if decided is None and step == self.start:
            decided = {"phase": CHOSEN, "found": self.found(state)}
        elif decided is None and step == 0:
            decided = {"phase": PLAIN}
        if decided is None:
            return None
        reason = "attention is the plain one" if decided["phase"] == PLAIN else "attention cores are replaced"
        return StructuralChange(reason, decided, partial(_mark, decided=decided))

    def model(self, model: nn.Module) -> nn.Module:
        places, decided = ATTENTION_SITES.set(model, find_attention_sites(model)), decided_phase(model)
        for place in places:
            if decided["phase"] == CHOSEN:
                place.put(self.core(place, decided.get("found", {})))
        phase = "replaced" if decided["phase"] == CHOSEN else "plain until the moment"
        add_note(f"{len(places)} attention cores, {phase}")
        return model

    def change_forward(self, model: nn.Module) -> None:
        if self.start:
            PHASE.set(model, {"phase": PLAIN})

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        def follow(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if decided_phase(model)["phase"] == CHOSEN:
                return
            if (step := finished_steps(optimizer)) >= self.start:
                found = self.found(TrainState(step, model))
                for place in ATTENTION_SITES.of(model):
                    place.take_away()
                self.model(_mark(model, {"phase": CHOSEN, "found": found}))
            elif model.training and torch.is_grad_enabled():
                self.before_pass(model, step, args, kwargs)

        if self.start:
            count_steps(optimizer)
            model.register_forward_pre_hook(follow, with_kwargs=True)

    def before_pass(self, model: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Act before a forward pass of a training step with plain attention."""

    def finish(self, model: nn.Module) -> nn.Module:
        phase = decided_phase(model)["phase"]
        if phase == CHOSEN:
            self.refuse_export()
        for place in ATTENTION_SITES.remove(model):
            place.take_away()
        return model

    def refuse_export(self) -> None:
        """Raises RefusedError unless the weights are to be exported for plain attention."""
        if not self.export_plain:
            raise RefusedError(
                f"{self.name}: the plain architecture attends to everything, and would compute something else with "
                "these weights",
                fix=f"--set techniques.{self.name}.export_plain=true where that is wanted",
            )

    def holds(self, state: TrainState) -> None:
        phases = [entry.decision["phase"] for entry in state.log if entry.technique == self.name]
        expected = [PLAIN, CHOSEN] if self.start else [CHOSEN]
        if state.step < self.start:
            expected = [PLAIN]
        # the change before a step is made when the step is
        if phases != expected and not (state.step == self.start and phases == [PLAIN]):
            raise IntegrityError(f"{self.name}: after {state.step} steps the log has the phases {phases}")


def _mark(model: nn.Module, decided: Mapping[str, Any]) -> nn.Module:
    PHASE.set(model, decided)
    return model


class CalibrationBackward:
    """A backward pass before which, in the last steps of plain attention, some examples go through the model and cores
    are watched. `state` counts calls; what was seen is added up in buffers of the attentions."""

    def __init__(self, inner: Backward, settings: "CalibratedAttention"):
        self.inner, self.settings = inner, settings
        # a value that can be read even where only shapes are traced, unlike that of torch.zeros
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
    """A core that needs numbers of the trained model. A subclass says what is measured at each call, in `measure`, and
    what the means of that come to, in `settle`."""

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.DEPTH: "each block is calibrated once, and blocks that are added later are not",
        Claim.PIPELINE_PARALLELISM: "the whole model is calibrated in one pass",
    }

    from_step: StepOrFraction = 0.1
    """Attention is the plain one up to here, for one step at least."""
    steps: Positive = 4
    """Before so many of the last plain steps examples are looked at."""
    examples: Positive = 8
    """At most so many of each rank's."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"changes", "backward"})

    @property
    def start(self) -> int:
        return max(int(self.from_step), 1)

    def measure(self, place: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Some numbers (n,) of a call, of which the mean over calls and ranks is wanted."""
        raise NotImplementedError

    def count(self, model: nn.Module, place: AttentionSite) -> int:
        """How many numbers `measure` gives."""
        return 1

    def settle(self, place: AttentionSite, means: Tensor) -> Any:
        """What is written to the log, of the means (n,)."""
        return means.tolist()

    def model(self, model: nn.Module) -> nn.Module:
        model = super().model(model)
        cores = SWAPPABLE_CORES.set(model, {})
        if decided_phase(model)["phase"] == PLAIN:
            for place in ATTENTION_SITES.of(model):
                device = next(place.module.parameters()).device
                count = self.count(model, place)
                place.module.register_buffer("calibration", torch.zeros(count + 1, dtype=torch.float64, device=device))
                cores[place.name] = SwappableCore(place.plain)
                place.put(cores[place.name])
        return model

    def backward(self, backward: Backward) -> Backward:
        return CalibrationBackward(backward, self)

    @torch.no_grad()
    def calibrate(self, model: nn.Module, forward: Callable[[], object]) -> None:
        """One forward pass without dropout, watched; the mean over ranks is added to the buffers."""
        places, cores = ATTENTION_SITES.of(model), SWAPPABLE_CORES.of(model)
        if not cores:  # replaced already: only what a step takes is asked
            return
        seen: dict[str, list[Tensor]] = {place.name: [] for place in places}
        for place in places:
            cores[place.name].watch = partial(self._see, place, seen[place.name])
        training = model.training
        try:
            with preserved_draws(model.parameters()), torch.compiler.set_stance("force_eager"):
                model.eval()
                forward()
        finally:
            model.train(training)
            for place in places:
                cores[place.name].watch = None
        for place in places:
            if seen[place.name]:
                mean = mean_over_ranks(torch.stack(seen[place.name]).double().mean(0))
                place.module.calibration += torch.cat((mean.to(place.module.calibration), mean.new_ones(1)))

    def _see(self, place: AttentionSite, seen: list[Tensor], q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        seen.append(self.measure(place, q, k, mask).flatten())

    def before_pass(self, model: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = ATTENTION_SITES.of(model)[0].module
        done = int(place.calibration[-1])  # in earlier steps, those before a checkpoint included
        first = max(self.start - self.steps, 0)
        if step < first or step - first < done:
            return
        count = next((len(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.ndim), 0)

        def some(value: Any) -> Any:
            is_rows = isinstance(value, Tensor) and value.ndim and len(value) == count
            return value[: self.examples] if is_rows else value

        few = tree_map(some, (args, kwargs))
        self.calibrate(model, lambda: model(*few[0], **few[1]))

    def found(self, state: TrainState) -> dict[str, Any]:
        if state.model is None:
            return {}
        calibration = {}
        for place in ATTENTION_SITES.of(state.model):
            sums, count = place.module.calibration[:-1], place.module.calibration[-1]
            if not count:
                raise IntegrityError(f"{self.name}: {place.name} was not reached while it was calibrated")
            calibration[place.name] = self.settle(place, sums / count)
        return calibration

    def finish(self, model: nn.Module) -> nn.Module:
        model = super().finish(model)
        for module in model.modules():
            if "calibration" in module._buffers:
                del module.calibration
        return model
