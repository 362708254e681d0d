"""Check that a loss depends on trained parameters of its model only."""

import gc
import weakref

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction, WrappedObjective


class ForeignParametersError(UsageError):
    """A loss depends on trained parameters that its model does not contain."""


class WatchedObjective(WrappedObjective):
    """Wrapper that remembers the trained parameters outside its model on which a loss depends."""

    def __init__(self, inner: Objective, model: nn.Module):
        super().__init__(inner)
        self.own = {id(parameter) for parameter in model.parameters()}
        self.is_sequence = isinstance(model, nn.Sequential)
        self.foreign: list[weakref.ref[nn.Parameter]] = []

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = super().losses(prediction, batch)
        self.foreign += [weakref.ref(leaf) for leaf in _parameters_of(losses) if id(leaf) not in self.own]
        return losses

    def refuse_foreign(self) -> None:
        """Raise ForeignParametersError, after the backward pass, if there are such parameters, because training would
        not change them. Parameters that a loss creates at each call are freed by then."""
        if any(each() is not None for each in self.foreign):
            gc.collect()
        if not (left := [parameter for each in self.foreign if (parameter := each()) is not None]):
            return
        # a module assigned to nn.Sequential would be called by it
        joined = 'nn.ModuleDict({"model": model, "criterion": criterion})' if self.is_sequence else ""
        raise ForeignParametersError(
            f"the loss depends on trained parameters that its model does not contain ({len(left)}, one of shape "
            f"{tuple(left[0].shape)}): training would not change them",
            fix="call the model that the loss receives, with its layers in nn.ModuleList, not in a list; train another "
            f"module as a part of it, such as {joined or 'model.criterion = criterion'}; or use the result of a fixed "
            "one by .detach(). If the model refers to itself, pass the function that builds it",
        )


def _parameters_of(result: Tensor) -> list[nn.Parameter]:
    """Return the parameters to which the gradient of a tensor of any shape flows, in reach of autograd's graph."""
    parameters: dict[int, nn.Parameter] = {}
    seen, nodes = set(), [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            parameters[id(leaf)] = leaf
        nodes += [following for following, _ in node.next_functions]
    return [*parameters.values()]
