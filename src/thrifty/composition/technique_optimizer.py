"""Optimizer techniques as `torch.optim.Optimizer`, with torch's parameter groups, schedulers and state dicts."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from thrifty.composition.group_partition import (
    GroupPartition,
    adopt_settings,
    elements_of,
    every_parameter,
    slot_names,
)
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.gradient_transform import GradientTransform, Slots, TransformChain, chain
from thrifty.core.old_names import order_key
from thrifty.core.run_relative_settings import refuse_shares, resolve_moments
from thrifty.core.stages import HOW
from thrifty.core.technique import Technique
from thrifty.modeling.parameter_kinds import marks_of
from thrifty.optim.parameter_partition import ParameterPartition
from thrifty.optim.torch_optimizer import TransformOptimizer, dense_gradients
from thrifty.optim.transform_elements import AddDecayedWeights

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
DECAYS_ALL = "decays_all"
"""Key of a parameter group. It is True if weight decay applies to all parameters of the group, vectors included."""
FOLLOWING_RATES = ("adamw_lr",)
"""Settings that keep their ratio to "lr", because schedulers and loops change only "lr". If a loop changes the setting
too, its value counts."""
BUILT = "built_{}"
"""Keys of a parameter group: the initial values of "lr" and of `FOLLOWING_RATES`, from which ratios are computed."""
_GROUP = re.compile(r"(^|\.)partition(#\d+)?\.group\d+(@\d+)?\.")


class TechniqueOptimizer(TransformOptimizer):
    """Torch optimizer of one technique. Its settings are keys of each parameter group and may change between steps.

    `params` is a module, named parameters, parameters or torch's parameter groups. Frozen parameters of a module are
    left out; to train them later, pass `model.named_parameters()`. For a module or named parameters, weight decay skips
    vectors, biases and positions. For bare parameters, and in a group with its own `weight_decay`, weight decay applies
    to all parameters, as in torch. A setting that is a fraction of the run requires `total_steps`. A parameter without
    a gradient is skipped, as in torch. A step may overwrite gradients.

    Raises UsageError for a setting out of bounds, and for bare parameters if the technique selects parameters by name.
    """

    technique: ClassVar[type[Technique]]
    _model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    """Weak reference to the module passed as `params`."""
    _untrained: Mapping[str, ref[Tensor]] = {}
    """Parameters of this module that were frozen at every step."""

    def __init__(self, params: Params, *, total_steps: int | None = None, **settings: Any):
        self.total_steps, self.added = total_steps, ()
        chosen = self._technique(settings)
        self._steps: list[int] = []
        self._forget()
        defaults = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
        torch.optim.Optimizer.__init__(self, self._groups(params, chosen), {**defaults, DECAYS_ALL: False})
        self.updates, self.born, self.births = 0, 0, {}

    def _technique(self, settings: Mapping[str, Any]) -> Technique:
        known = [field.name for field in fields(self.technique)]
        if unknown := [name for name in settings if name not in known]:
            raise UsageError(
                f"{self.technique.name} has no setting {unknown[0]!r}", fix=did_you_mean(unknown[0], known)
            )
        plain = {name: _plain(value) for name, value in settings.items()}
        chosen = self.technique(**plain)
        if self.total_steps is None:
            refuse_shares(chosen, self.technique.name)
            return chosen
        return resolve_moments(chosen, self.total_steps)

    def _groups(self, params: Params, chosen: Technique) -> list[dict[str, Any]]:
        if isinstance(params, nn.Module):
            self._model = ref(params)
            chosen.model(params)
            params = [pair for pair in params.named_parameters() if pair[1].requires_grad]
        groups = [params] if isinstance(params, Tensor | dict) else list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        return groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        members = param_group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        is_named = bool(members) and isinstance(members[0], tuple)
        if not is_named and self.technique.needs_names:
            raise UsageError(
                f"{self.technique.name} selects parameters by name, but these parameters have no names",
                fix="pass the model, or model.named_parameters()",
            )
        if not is_named:
            first = sum(len(group["params"]) for group in self.param_groups)
            members = [(f"parameter{first + index}", each) for index, each in enumerate(members)]
        own = {name: value for name, value in param_group.items() if name not in ("params", "param_names")}
        own.setdefault(DECAYS_ALL, not is_named or "weight_decay" in own)
        names = {} if members else {"param_names": []}  # torch sets none for an empty group
        super().add_param_group({**own, **names, "params": members})
        group = self.param_groups[-1]
        group.update(vars(self._technique(self._settings(group))))
        if following := [name for name in FOLLOWING_RATES if group.get(name) is not None]:
            for name in ("lr", *following):
                group.setdefault(BUILT.format(name), group[name])
        self._steps.extend([0] * len(members))

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The optimizer's own technique with default settings, and the added techniques."""
        return (self.technique(), *self.added)

    @property
    def slots(self) -> Slots:
        """State of all parameters, without the prefixes of groups. A tensor is empty if a parameter lacks the slot."""
        self._join()
        states = [(each, self.state.get(each, {})) for each in self.parameters]
        names = dict.fromkeys(slot for _, state in states for slot in state if slot != "step")
        return {slot: [state[slot] if slot in state else each.new_empty(0) for each, state in states] for slot in names}

    def add(self, technique: Technique) -> None:
        """Add a technique that changes the update. Raises UsageError after the first step."""
        if self.updates:
            raise UsageError(
                f"{technique.name}: the optimizer has already made {self.updates} steps",
                fix=f"add {technique.name} before the first step",
            )
        self.added = (*self.added, technique)
        self._forget()

    def rename(self, model: nn.Module) -> None:
        """Name parameters as in `model`. Parameters outside the model keep their names."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in self.param_groups:
            own = zip(group["params"], group["param_names"], strict=True)
            group["param_names"] = [names.get(id(parameter), name) for parameter, name in own]

    def algorithms(self, group: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the names of a group's parameters, grouped by the sequence of update elements applied to them."""
        parts: dict[str, list[str]] = {}
        elements = self._chain(group, 0).elements
        split = next((each for each in elements.values() if isinstance(each, ParameterPartition)), None)
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            label = split.label_of(name, parameter) if split else ""
            inner = split.rules[label][1] if split else None
            steps = inner.elements if isinstance(inner, TransformChain) else elements
            parts.setdefault((f"{label}: " if label else "") + ", ".join(steps), []).append(name)
        return parts

    def make_update(self) -> None:
        self._warn_of_untrained()
        parameters = self.parameters
        active = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        if not active:
            return
        scoring_steps = max((getattr(each, "scoring_steps", 0) for each in self.added), default=0)
        if self.updates < scoring_steps:  # a missing gradient then counts as zero
            active = list(range(len(parameters)))
        self._locate(active)
        own, names = [parameters[index] for index in active], self.names
        gradients = dense_gradients([names[index] for index in active], own)
        self.site.update(gradients, own, self.updates, self.age)
        self.updates += 1
        for index in active:
            self._steps[index] += 1
        for count in self._counts:
            count += 1

    def _warn_of_untrained(self) -> None:
        """Warn once of each trainable parameter of the model that the optimizer lacks, such as an adapter applied later
        or a weight that was frozen when the optimizer was built."""
        if (model := self._model()) is not None:
            self._model = lambda: None
            self._untrained = {name: ref(parameter) for name, parameter in model.named_parameters()}
        present = {name: parameter for name, each in self._untrained.items() if (parameter := each()) is not None}
        if not (trained := {name: each for name, each in present.items() if each.requires_grad}):
            return
        self._untrained = {name: ref(each) for name, each in present.items() if name not in trained}
        known = {id(each) for each in self.parameters}
        if missing := [name for name, each in trained.items() if id(each) not in known]:
            what = f"{len(missing)} trainable parameters of the model are not in the optimizer, such as {missing[0]}"
            fix = "after thrifty.apply(model, …), and of model.named_parameters() if you unfreeze parameters later"
            warnings.warn(f"{what}: build the optimizer {fix}", stacklevel=4)

    @torch.no_grad()
    def scalars(self) -> dict[str, float]:
        self._locate(self._active or list(range(len(self._steps))))  # a scheduler may have changed the groups
        return super().scalars()

    @torch.no_grad()
    def eval_weights(self) -> list[Tensor] | None:
        stepped = [index for index, count in enumerate(self._steps) if count]
        if not stepped:
            return None
        self._locate(stepped)
        result = self.parameters
        values = self.site.eval_weights([result[index] for index in stepped], self.scalars())
        for index, value in zip(stepped, values or [], strict=bool(values)):
            result[index] = value
        return result if values else None

    @torch.no_grad()
    def apply_constraints(self) -> None:
        self._locate(list(range(len(self._steps))))
        super().apply_constraints()

    def state_dict(self) -> dict[str, Any]:
        self._join()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. Raise UsageError, before any change, if the state dict belongs to another optimizer."""
        backup = self.__getstate__()
        groups = [dict(group) for group in backup["param_groups"]]
        backup = {**backup, "state": backup["state"].copy(), "param_groups": groups}
        known = {field.name for field in fields(self.technique)}
        if any(not known <= group.keys() for group in state_dict["param_groups"]):
            raise UsageError(
                f"this state belongs to another optimizer: it lacks the settings of {self.technique.name}",
                fix="load it into an optimizer of the same technique",
            )
        try:
            super().load_state_dict(state_dict)
            for group, old in zip(self.param_groups, groups, strict=True):
                group["param_names"] = old["param_names"]  # techniques select parameters by these names
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            for number, parameter in zip(numbers, self.parameters, strict=True):
                for slot, value in state_dict["state"].get(number, {}).items():
                    # torch would cast each value to the parameter's dtype
                    self.state[parameter][slot] = value.to(parameter.device, copy=True) if slot != "step" else value
            self._forget()
            self._steps = [int(self.state[each]["step"]) if each in self.state else 0 for each in self.parameters]
            self.updates = max(self._steps, default=0)
            if self.updates:
                self._locate([index for index, count in enumerate(self._steps) if count])
        except UsageError:
            self.__setstate__(backup)
            raise

    def __getstate__(self) -> dict[str, Any]:
        self._join()
        own = {name: getattr(self, name) for name in ("total_steps", "added", "updates", "born", "births", "_steps")}
        return {**super().__getstate__(), **own, "marks": [marks_of(each) for each in self.parameters]}

    def _join(self) -> None:
        """Wait for an update that is still being computed, because it changes the state."""
        if hasattr(self, "site"):
            self.site.join()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "marks"})
        for parameter, marks in zip(self.parameters, state.get("marks", ()), strict="marks" in state):
            vars(parameter).update(marks)
        self._forget()

    def _forget(self) -> None:
        """Clear cached plans, so that the next step prepares its update again."""
        self._key: object = None
        self._active: list[int] = []
        self._chains: dict[str, tuple[int, TransformChain]] = {}
        self._tuned: list[dict[str, Any]] = []
        self._counts: list[Tensor] = []

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        settings = {field.name: _plain(group[field.name]) for field in fields(self.technique)}
        for name in [
            each for each in FOLLOWING_RATES if settings.get(each) is not None and group.get(BUILT.format("lr"))
        ]:
            if "initial_lr" in group or group[name] == group.get(BUILT.format(name)):  # the first is a scheduler's key
                settings[name] *= settings["lr"] / group[BUILT.format("lr")]
        return settings

    @torch._disable_dynamo
    def _locate(self, active: list[int]) -> None:
        """Prepare the update of the parameters with these indices. Parameters added later have their own age."""
        parameters, all_names = self.parameters, self.names
        groups = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        key = [(id(parameters[index]), groups[index], self.updates - self._steps[index]) for index in active]
        settings = [self._settings(group) for group in self.param_groups]
        own = [parameters[index] for index in active]
        self._active = active
        if key == self._key:
            if settings != self._tuned:
                self._tune(settings)
                self.site.prepare(own)
            return
        self._join()
        is_known, is_new = self._key is not None, not self.state
        labels = [f"group{group}" + (f"@{born}" if born else "") for _, group, born in key]
        self._chains = {
            label: (group, self._chain(self.param_groups[group], born))
            for label, (_, group, born) in zip(labels, key, strict=True)
        }
        chains = {label: each for label, (_, each) in self._chains.items()}
        is_one = set(labels) == {"group0"}
        self.transform = self._with_added(chains["group0"] if is_one else GroupPartition(chains, labels))
        # new state applies its initial masks to the weights, but the present masks differ
        values = [each.detach().clone() for each in own] if self.added and not is_new else []
        self.site = self.located([all_names[index] for index in active], own)
        with torch.no_grad():  # not by `data`, because copies on the host follow the parameters' versions
            for parameter, value in zip(own, values, strict=bool(values)):
                parameter.copy_(value)
            self._tuned = settings
            self._fill(own, labels, is_known)
            if not is_new:
                self.site.apply_constraints(own)
        self._key = key

    def _chain(self, group: Mapping[str, Any], born: int) -> TransformChain:
        transform = chain(self._technique(self._settings(group)).update(GradientTransform()))
        for element in transform.elements.values() if group[DECAYS_ALL] else ():
            if isinstance(element, AddDecayedWeights):
                element.where = every_parameter
        for element in elements_of(transform) if born else ():
            element.born = born
        return transform

    def _with_added(self, optimizer: GradientTransform) -> TransformChain:
        """Return the optimizer wrapped by the added techniques, as in `Run.transform`."""
        folded = GradientTransform()
        ordered = sorted([self.technique, *self.added], key=lambda each: (each.stage, order_key(each.name)))
        for technique in sorted(reversed(ordered), key=lambda technique: technique.stage in HOW):
            folded = chain(optimizer, folded) if technique is self.technique else technique.update(folded)
        return folded if type(folded) is TransformChain else chain(folded)

    def _tune(self, settings: list[dict[str, Any]]) -> None:
        for number, old in self._chains.values():
            if changed := [name for name, value in settings[number].items() if value != self._tuned[number][name]]:
                group = self.param_groups[number]
                new, current = self._chain(group, 0), self._chain({**group, **self._tuned[number]}, 0)
                is_number = all(type(settings[number][name]) in (int, float, tuple) for name in changed)
                is_scheduled = "lr" in changed and Claim.SCHEDULE in self.technique.claims and self._tuned[number]["lr"]
                if not is_number or is_scheduled or slot_names(new) != slot_names(current):
                    raise UsageError(
                        f"{self.technique.name}: {' and '.join(changed)} cannot change between steps",
                        fix="start a new optimizer with the new value",
                    )
                adopt_settings(old, new)
        self._tuned = settings

    def _fill(self, parameters: list[Tensor], labels: Sequence[str], is_known: bool) -> None:
        """Copy the present state to the new `UpdateLocation`, and put the tensors of that location into
        `self.state`."""
        counts: dict[str, Tensor] = {}
        for place, (parameter, label) in enumerate(zip(parameters, labels, strict=True)):
            slots = dict(_slots_of(self.site.slots, place))
            stored = self.state.get(parameter, {})
            if stored:
                if not is_known and (lost := stored.keys() - slots.keys() - {"step"}):
                    raise UsageError(
                        f"this state has {min(lost)!r} of a technique that the optimizer lacks",
                        fix='add the technique before loading, such as thrifty.apply((model, optimizer), "ema")',
                    )
                for slot, (name, tensor) in slots.items():
                    if slot not in stored and not self.updates:
                        continue  # belongs to a technique that was added later
                    _check_fits(tensor, stored.get(slot), slot)
                    if is_known and name in self.site.state:
                        self.site.state[name][place] = stored[slot]
                    else:
                        tensor.copy_(stored[slot])
            if label not in counts:
                steps = stored["step"] if stored else 0.0
                counts[label] = torch.tensor(float(steps))
            current = dict(_slots_of(self.site.slots, place))
            self.state[parameter] = {"step": counts[label], **{slot: tensor for slot, (_, tensor) in current.items()}}
        self._counts = list(counts.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # torch's schedulers may store a learning rate in a tensor
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def _slots_of(slots: Slots, place: int) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """Yield the state slots of one parameter: the name without the parameter group, the full name, and the tensor."""
    for name, tensors in slots.items():
        if tensors[place].numel():
            yield _GROUP.sub(r"\1", name), (name, tensors[place])


def _check_fits(tensor: Tensor, stored: Tensor | None, slot: str) -> None:
    is_other = stored is not None and tensor.dtype.is_floating_point != stored.dtype.is_floating_point
    if stored is None or stored.shape != tensor.shape or is_other:
        problem = "is missing" if stored is None else f"is {_described(stored)}, not {_described(tensor)}"
        fix = "load it into an optimizer of the same technique, settings and parameters"
        raise UsageError(f"this state belongs to another optimizer: {slot!r} {problem}", fix=fix)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)}".removeprefix("torch.")
