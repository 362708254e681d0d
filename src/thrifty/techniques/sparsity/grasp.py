"""GraSP (Wang et al. 2020): prune before training, keeping the weights that preserve gradient flow.

Paper       Wang et al. 2020, Picking Winning Tickets Before Training by Preserving Gradient Flow (arXiv 2002.07376).
Promise     One mask for the run. It keeps the fraction `density` of weights whose removal would reduce the gradient
            norm most, to first order.
Use         run = thrifty.train(model, texts, held_out=held_out, techniques=["grasp:density=0.1"], budget="2000 steps")
Start with  `grasp:density=0.02,scoring_steps=1`; the method is made for very low densities. Use more scoring steps for
            small batches.
Cost        The first `scoring_steps` steps make no update, count in the budget, and take about four times the
            computation of other steps. Mask selection takes as much memory as in sparsity.snip.
Avoid       Moderate densities, because the choice of weights is then noisy: use sparsity.snip.
Does not    Balance the classes of the scoring batch as in the paper, or prune biases, norms, embeddings and the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.randomness import preserved_draws
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.state import TrainState
from thrifty.optim.mask_selection import masked_shapes
from thrifty.optim.transform_elements import global_norm
from thrifty.techniques.sparsity._mask_techniques import SaliencyMaskTechnique


def grasp_scores(weight: Tensor, hessian_gradient: Tensor) -> Tensor:
    """Return GraSP's score of each weight, weight · (H g). Weights with the largest scores are kept.

    To first order, the score is half of the decrease of the squared gradient norm if a weight is removed. H is the
    Hessian of the loss and g its gradient. All tensors have the weight's shape.
    """
    return weight * hessian_gradient


class TemperatureHead(nn.Module):
    """An output head whose logits are divided by `temperature`.

    The head is not an nn.Linear. Losses therefore compute all logits at once, and can be differentiated twice.
    """

    def __init__(self, head: nn.Module, temperature: float):
        super().__init__()
        self.head, self.temperature = head, temperature

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) / self.temperature


class TemperedObjective(WrappedObjective):
    """Wrapper of an objective that divides the logits by a temperature in gradients only. Loss values are unchanged."""

    def __init__(self, inner: Objective, temperature: float):
        super().__init__(inner)
        self.temperature = temperature

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        if prediction.output is not None:
            cooled = Prediction(output=prediction.output / self.temperature)
        else:
            assert prediction.head is not None
            cooled = Prediction(hidden=prediction.hidden, head=TemperatureHead(prediction.head, self.temperature))
        losses = super().losses(cooled, batch)
        with torch.no_grad():
            values = super().losses(prediction, batch)
        return losses + (values - losses.detach())


class DirectionalObjective(WrappedObjective):
    """Wrapper of an objective whose weighted losses sum to the dot product of the loss gradient and a vector.

    The gradient of that sum is the Hessian-vector product.
    """

    def __init__(self, inner: Objective, parameters: Sequence[Tensor], vector: Sequence[Tensor]):
        super().__init__(inner)
        self.parameters, self.vector = parameters, vector

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        loss = (super().losses(prediction, batch) * batch.weight).sum()
        gradients = torch.autograd.grad(
            loss, self.parameters, create_graph=True, allow_unused=True, materialize_grads=True
        )
        products = [(gradient * each).sum() for gradient, each in zip(gradients, self.vector, strict=True)]
        product = torch.stack(products).sum()
        # distributed over the examples, so that the weighted losses sum to it
        return product * batch.weight / batch.weight.square().sum().clamp_min(torch.finfo(torch.float32).tiny)


def hessian_gradient(
    backward: Backward,
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    parameters: Sequence[Tensor],
    temperature: float,
) -> BackwardResult:
    """Write the product H g to `.grad`, by two backward passes over a batch with equal random values.

    H is the Hessian and g the gradient of the loss with respect to `parameters`. Logits are divided by the temperature.
    """
    tempered = TemperedObjective(objective, temperature)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        with preserved_draws(parameters):
            outcome = backward(model, tempered, batch)
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for parameter in model.parameters():
            parameter.grad = None
        again = backward(model, DirectionalObjective(tempered, parameters, gradient), batch)
    return replace(outcome, overflow_handled=outcome.overflow_handled or again.overflow_handled)


class GraspBackward:
    """A backward pass that, in scoring steps, writes the product H g to `.grad` instead of the gradient g.

    H is the Hessian of the loss. `state` has the number of scored steps. Steps with non-finite values are not counted,
    because the training loop skips them.
    """

    def __init__(self, inner: Backward, settings: "Grasp"):
        self.inner, self.settings = inner, settings
        # torch.tensor is readable while shapes are traced
        self.state = {"scored": torch.tensor(0)}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        if int(self.state["scored"]) >= self.settings.scoring_steps:
            return self.inner(model, objective, batch)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        masked = [trained[name] for name in self.settings.masked(masked_shapes(trained))]
        outcome = hessian_gradient(self.inner, model, objective, batch, masked, self.settings.temperature)
        norm = global_norm([parameter.grad for parameter in trained.values() if parameter.grad is not None])
        if isinstance(norm, FakeTensor) or (norm + outcome.loss).isfinite():
            self.state["scored"].add_(1)
        return outcome


class Grasp(SaliencyMaskTechnique):
    """Scores are signed: weights with the largest w · (H g) are kept, with the Hessian H and gradient g of the masked
    weights. The absolute value would also keep weights that reduce gradient flow. Logits are divided by `temperature`
    during scoring. H g is exact for the effective batch of each step, dropout included, over micro-batches and ranks. H
    g of several scoring steps is summed. During scoring, attention uses torch's implementation without fused kernels.
    The method assumes Xavier initialization. `explain` predicts the cost of a scoring step. The metric "empty_weights"
    counts layers without remaining weights."""

    clashes: ClassVar[Mapping[Claim, str]] = {
        **SaliencyMaskTechnique.clashes,
        Claim.COMPILED_BLOCKS: "compiled blocks have no second derivative",
        Claim.ATTENTION_CORE: "tiled attention has no second derivative",
        Claim.LINEAR_PRODUCTS: "8-bit products have no second derivative",
        Claim.SAVED_TENSORS: "replaced saved tensors have no second derivative",
        Claim.PARAMETER_SHARDING: "parameters gathered in between have no second derivative",
        Claim.TENSOR_PARALLELISM: "the sums over ranks inside a layer have no second derivative",
        Claim.PIPELINE_PARALLELISM: "pipeline stages exchange first derivatives only",
        Claim.SELECTED_EXAMPLES: "both passes of a scoring step must see the same examples",
    }

    temperature: Annotated[float, SettingBound(above=0)] = 200.0
    """Divisor of the logits during scoring."""

    def objective(self, objective: Objective) -> Objective:
        if objective.joint:
            raise RefusedError(
                "a loss that compares examples has no second derivative in this technique",
                fix="--with sparsity.snip in its place",
            )
        return objective

    def backward(self, backward: Backward) -> Backward:
        return GraspBackward(super().backward(backward), self)

    def scores(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return grasp_scores(weight, gradient)

    def holds(self, state: TrainState) -> None:
        super().holds(state)
        assert state.optimizer is not None
        scored, due = int(state.techniques[self.name]["scored"]), min(state.optimizer.updates, self.scoring_steps)
        if scored != due:
            raise IntegrityError(f"{self.name}: {scored} of the first {due} steps were scored")
