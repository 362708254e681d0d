"""Check that a loss depends on trained parameters of its model only."""

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction, WrappedObjective


class OwnParametersObjective(WrappedObjective):
    """Wrapper that raises UsageError if a loss depends on trained parameters that its model does not contain. No
    optimizer would update them."""

    def __init__(self, inner: Objective, model: nn.Module):
        super().__init__(inner)
        self.own = {id(parameter) for parameter in model.parameters()}
        self.is_sequence = isinstance(model, nn.Sequential)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = super().losses(prediction, batch)
        if foreign := [leaf for leaf in _parameters_of(losses) if id(leaf) not in self.own]:
            # a module assigned to nn.Sequential would be called by it
            joined = 'nn.ModuleDict({"model": model, "criterion": criterion})' if self.is_sequence else ""
            raise UsageError(
                f"the loss depends on trained parameters that its model does not contain ({len(foreign)}, one of shape "
                f"{tuple(foreign[0].shape)}): training would not change them",
                fix="call the model that the loss receives; train other modules as parts of it, such as "
                f"{joined or 'model.criterion = criterion'}; or freeze them: criterion.requires_grad_(False)",
            )
        return losses


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
