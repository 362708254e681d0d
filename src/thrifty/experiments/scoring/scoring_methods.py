"""Scoring methods. Each method scores all training examples with one model; a higher score means a harder example."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.randomness import keyed_generator
from thrifty.core.score_file import PredictedLabels
from thrifty.core.tensor_tracing import StepTrace
from thrifty.data.epoch_sampler import EpochSource
from thrifty.kernels import example_scores

GRADIENT_BYTES = 1 << 28
"""Approximate maximum bytes of per-example gradients that GraNd computes in one batch."""


@dataclass
class ScoringContext:
    """A model, and the training examples that it scores, in order and without augmentation."""

    model: nn.Module
    objective: Objective
    examples: EpochSource
    device: torch.device
    seed: int
    clusters: int
    say: Callable[[str], None] = lambda text: None
    flops: float = 0.0
    """FLOPs spent on scoring."""
    guesses: PredictedLabels | None = None
    """Predicted labels of a classifier in its latest scoring pass."""

    def batches(self) -> Iterator[Batch]:
        """Yield every example once, as inputs of the objective."""
        for batch in self.examples.sequential_batches(self.examples.batch):
            yield self.objective.examples(batch).to(self.device)

    @torch.no_grad()
    def scores_of(self, score: Callable[[Prediction, Batch], Tensor]) -> Tensor:
        """Return the scores of the model's predictions for all n examples, (n,). Store the predicted labels of a
        classifier in `guesses`.
        """
        self.model.eval()
        scores, predicted = [], []
        for number, batch in enumerate(self.batches()):
            if number == 0:
                with StepTrace() as trace:
                    prediction = self.objective.predict(self.model, batch)
                self.flops += trace.flops * self.examples.examples / len(batch)
            else:
                prediction = self.objective.predict(self.model, batch)
            scores.append(score(prediction, batch).float().cpu())
            if "labels" in batch.fields:
                predicted.append(_predicted_labels(prediction.logits.float().softmax(-1), batch["labels"]))
        self.guesses = PredictedLabels(*map(torch.cat, zip(*predicted, strict=True))) if predicted else None
        return torch.cat(scores)


def _predicted_labels(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    confidence, predicted = probabilities.max(-1)
    return predicted.cpu(), confidence.cpu(), probabilities.gather(1, labels[:, None]).squeeze(1).cpu()


def el2n(sight: ScoringContext) -> Tensor:
    """Return the norm of softmax minus one-hot label for each of n examples, (n,). For text, the norm covers all tokens
    of an example.
    """

    def score(prediction: Prediction, batch: Batch) -> Tensor:
        if "labels" in batch.fields:
            return example_scores.el2n(prediction.logits, batch["labels"])
        return sight.objective.scores(prediction, batch)

    try:
        return sight.scores_of(score)
    except NotImplementedError as error:
        raise UsageError(str(error), fix="--method loss; or --method grand") from None


def loss(sight: ScoringContext) -> Tensor:
    return sight.scores_of(sight.objective.losses)


def margin(sight: ScoringContext) -> Tensor:
    return sight.scores_of(lambda prediction, batch: example_scores.margin(prediction.logits, batch["labels"]))


def is_correct(sight: ScoringContext) -> Tensor:
    """Return a tensor (n,) over n examples: 1 for correctly classified examples, and 0 for all others."""
    return sight.scores_of(lambda prediction, batch: prediction.logits.argmax(-1) == batch["labels"])


class _ExampleLoss(nn.Module):
    """Module that maps the fields of one example, without a batch dim, to the loss of the example."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, fields: Mapping[str, Tensor]) -> Tensor:
        weight = torch.ones(1, device=next(iter(fields.values())).device)
        batch = Batch({name: value[None] for name, value in fields.items()}, weight)
        prediction = self.objective.predict(self.model, batch)
        if prediction.hidden is not None and prediction.head is not None:
            # hide the head's weight: torch.func cannot batch the custom backward pass of the chunked loss
            prediction = Prediction(hidden=prediction.hidden, head=nn.Sequential(prediction.head))
        return self.objective.losses(prediction, batch).squeeze(0)


def grand(sight: ScoringContext) -> Tensor:
    """Return the norm of the loss gradient over all trainable parameters for each of n examples, (n,)."""
    example_loss = _ExampleLoss(sight.model.eval(), sight.objective)
    learning = {name: value for name, value in example_loss.named_parameters() if value.requires_grad}
    size = sum(value.numel() * value.element_size() for value in learning.values())
    chunk = max(1, min(64, GRADIENT_BYTES // max(size, 1)))

    def loss_of(parameters: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> Tensor:
        return functional_call(example_loss, dict(parameters), (fields,))

    chunks: list[Tensor] = []
    batched = True
    for batch in sight.batches():
        if batched:
            try:
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    chunks.append(example_scores.grand(loss_of, learning, batch.fields, chunk).cpu())
                continue
            except RuntimeError as error:
                if chunks or is_out_of_memory(error):
                    raise
                batched = False
                sight.say(
                    f"torch.func cannot batch this model ({str(error).splitlines()[0]}); scoring one example at a time"
                )
        chunks.append(_one_at_a_time(example_loss, list(learning.values()), batch))
    scores = torch.cat(chunks)
    before = sight.flops
    sight.scores_of(lambda prediction, batch: batch.weight)
    sight.flops += 3 * (sight.flops - before)  # a backward pass costs two forward passes
    return scores


def _one_at_a_time(example_loss: _ExampleLoss, learning: list[nn.Parameter], batch: Batch) -> Tensor:
    norms = []
    for row in range(len(batch)):
        gradients = torch.autograd.grad(
            example_loss({name: value[row] for name, value in batch.fields.items()}), learning, allow_unused=True
        )
        norms.append(torch.stack([each.float().square().sum() for each in gradients if each is not None]).sum().sqrt())
    return torch.stack(norms).cpu()


def prototype(sight: ScoringContext) -> Tensor:
    """Return the cosine distance of each of n examples, (n,): from its embedding to the k-means center of its cluster.
    The embedding is the input of the model's head.
    """
    head, hidden_states = getattr(sight.model, "head", None), []
    if not isinstance(head, nn.Module):
        raise UsageError(
            f"{type(sight.model).__name__} has no module `head`, whose input is the embedding",
            fix="choose another model: --embed-with FOLDER",
        )
    embeddings: list[Tensor] = []

    def embed(prediction: Prediction, batch: Batch) -> Tensor:
        hidden = hidden_states.pop() if prediction.hidden is None else prediction.hidden
        embeddings.append(hidden.float().flatten(1, -2).mean(1).cpu() if hidden.ndim > 2 else hidden.float().cpu())
        hidden_states.clear()
        return batch.weight

    handle = head.register_forward_pre_hook(lambda module, inputs: hidden_states.append(inputs[0]))
    try:
        sight.scores_of(embed)
    finally:
        handle.remove()
    return example_scores.prototype_distance(torch.cat(embeddings), sight.clusters, sight.seed)


def random(sight: ScoringContext) -> Tensor:
    return torch.rand(sight.examples.examples, generator=keyed_generator(f"scores/{sight.seed}"))


def input_norm(sight: ScoringContext) -> Tensor:
    return torch.cat([example_scores.input_norms(batch["inputs"]).cpu() for batch in sight.batches()])


@dataclass(frozen=True)
class ScoringMethod:
    about: str
    score: Callable[[ScoringContext], Tensor]
    trained: bool = True
    """True if the method trains a model."""
    needs: str = ""
    """Name of a field that every example must have."""


METHODS: Mapping[str, ScoringMethod] = {
    "el2n": ScoringMethod("norm of the error, softmax minus label", el2n),
    "grand": ScoringMethod("norm of the example's own gradient over all parameters", grand),
    "forgetting": ScoringMethod(
        "number of times a correct prediction of the example became wrong", is_correct, needs="labels"
    ),
    "loss": ScoringMethod("loss of the example", loss),
    "margin": ScoringMethod(
        "how much likelier the best other label is than the example's label", margin, needs="labels"
    ),
    "prototype": ScoringMethod("cosine distance of the embedding to its k-means center", prototype),
    "random": ScoringMethod("random, as a control", random, trained=False),
    "input_norm": ScoringMethod("norm of the pixels, as a control", input_norm, trained=False, needs="inputs"),
}
