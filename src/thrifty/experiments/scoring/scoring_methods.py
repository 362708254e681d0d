"""What examples are scored by. Each method looks at all training examples with one model; higher is harder."""

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
"""About what the gradients of the examples that GraNd goes through at a time may take."""


@dataclass
class ScoringContext:
    """A model, and the training examples as it is to see them: one by one and unchanged."""

    model: nn.Module
    objective: Objective
    examples: EpochSource
    device: torch.device
    seed: int
    clusters: int
    say: Callable[[str], None] = lambda text: None
    flops: float = 0.0
    """Spent on looking."""
    guesses: PredictedLabels | None = None
    """What a classifier would have answered, at the last look."""

    def batches(self) -> Iterator[Batch]:
        """Every example once, made into what the objective learns from."""
        for batch in self.examples.sequential_batches(self.examples.batch):
            yield self.objective.examples(batch).to(self.device)

    @torch.no_grad()
    def scores_of(self, score: Callable[[Prediction, Batch], Tensor]) -> Tensor:
        """What `score` makes of the predictions (n,); what a classifier would have answered is left in `guesses`."""
        self.model.eval()
        scores, seen = [], []
        for number, batch in enumerate(self.batches()):
            if number == 0:
                with StepTrace() as trace:
                    prediction = self.objective.predict(self.model, batch)
                self.flops += trace.flops * self.examples.examples / len(batch)
            else:
                prediction = self.objective.predict(self.model, batch)
            scores.append(score(prediction, batch).float().cpu())
            if "labels" in batch.fields:
                seen.append(_answers(prediction.logits.float().softmax(-1), batch["labels"]))
        self.guesses = PredictedLabels(*map(torch.cat, zip(*seen, strict=True))) if seen else None
        return torch.cat(scores)


def _answers(share: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    confidence, predicted = share.max(-1)
    return predicted.cpu(), confidence.cpu(), share.gather(1, labels[:, None]).squeeze(1).cpu()


def el2n(sight: ScoringContext) -> Tensor:
    """Of classes the norm of softmax minus label; of tokens the norm of all these errors of an example together."""

    def score(prediction: Prediction, batch: Batch) -> Tensor:
        if "labels" in batch.fields:
            return example_scores.el2n(prediction.logits, batch["labels"])
        return sight.objective.scores(prediction, batch)

    try:
        return sight.scores_of(score)
    except NotImplementedError as error:
        raise UsageError(str(error), fix="--method loss or --method grand") from None


def loss(sight: ScoringContext) -> Tensor:
    return sight.scores_of(sight.objective.losses)


def margin(sight: ScoringContext) -> Tensor:
    return sight.scores_of(lambda prediction, batch: example_scores.margin(prediction.logits, batch["labels"]))


def right_answers(sight: ScoringContext) -> Tensor:
    """Whether each example is told right (n,), 1 or 0."""
    return sight.scores_of(lambda prediction, batch: prediction.logits.argmax(-1) == batch["labels"])


class _ExampleLoss(nn.Module):
    """The loss of one example, whose fields have no dimension of examples, as a module of its model's parameters."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, fields: Mapping[str, Tensor]) -> Tensor:
        weight = torch.ones(1, device=next(iter(fields.values())).device)
        batch = Batch({name: value[None] for name, value in fields.items()}, weight)
        prediction = self.objective.predict(self.model, batch)
        if prediction.hidden is not None and prediction.head is not None:
            # a head that hides its weight: the loss in chunks has a backward pass of its own, which cannot be batched
            prediction = Prediction(hidden=prediction.hidden, head=nn.Sequential(prediction.head))
        return self.objective.losses(prediction, batch).squeeze(0)


def grand(sight: ScoringContext) -> Tensor:
    """The norm of the gradient of the example's own loss over all parameters that learn."""
    asked = _ExampleLoss(sight.model.eval(), sight.objective)
    learning = {name: value for name, value in asked.named_parameters() if value.requires_grad}
    size = sum(value.numel() * value.element_size() for value in learning.values())
    chunk = max(1, min(64, GRADIENT_BYTES // max(size, 1)))

    def loss_of(parameters: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> Tensor:
        return functional_call(asked, dict(parameters), (fields,))

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
                sight.say(f"torch.func cannot batch this model ({str(error).splitlines()[0]}): one example at a time")
        chunks.append(_one_at_a_time(asked, list(learning.values()), batch))
    scores = torch.cat(chunks)
    before = sight.flops
    sight.scores_of(lambda prediction, batch: batch.weight)
    sight.flops += 3 * (sight.flops - before)  # a backward pass costs two forward ones
    return scores


def _one_at_a_time(asked: _ExampleLoss, learning: list[nn.Parameter], batch: Batch) -> Tensor:
    norms = []
    for row in range(len(batch)):
        gradients = torch.autograd.grad(
            asked({name: value[row] for name, value in batch.fields.items()}), learning, allow_unused=True
        )
        norms.append(torch.stack([each.float().square().sum() for each in gradients if each is not None]).sum().sqrt())
    return torch.stack(norms).cpu()


def prototype(sight: ScoringContext) -> Tensor:
    """The cosine distance of an example's embedding, which is what the model's head is given, to its k-means centre."""
    head, hidden_states = getattr(sight.model, "head", None), []
    if not isinstance(head, nn.Module):
        raise UsageError(
            f"{type(sight.model).__name__} keeps no head apart, whose input could be an example's embedding",
            fix="name another model: --embed-with FOLDER",
        )
    kept: list[Tensor] = []

    def embed(prediction: Prediction, batch: Batch) -> Tensor:
        hidden = hidden_states.pop() if prediction.hidden is None else prediction.hidden
        kept.append(hidden.float().flatten(1, -2).mean(1).cpu() if hidden.ndim > 2 else hidden.float().cpu())
        hidden_states.clear()
        return batch.weight

    handle = head.register_forward_pre_hook(lambda module, inputs: hidden_states.append(inputs[0]))
    try:
        sight.scores_of(embed)
    finally:
        handle.remove()
    return example_scores.prototype_distance(torch.cat(kept), sight.clusters, sight.seed)


def random(sight: ScoringContext) -> Tensor:
    return torch.rand(sight.examples.examples, generator=keyed_generator(f"scores/{sight.seed}"))


def input_norm(sight: ScoringContext) -> Tensor:
    return torch.cat([example_scores.input_norms(batch["inputs"]).cpu() for batch in sight.batches()])


@dataclass(frozen=True)
class ScoringMethod:
    about: str
    score: Callable[[ScoringContext], Tensor]
    trained: bool = True
    """Whether a model is trained for it."""
    needs: str = ""
    """A field that examples must have."""


METHODS: Mapping[str, ScoringMethod] = {
    "el2n": ScoringMethod("norm of the error, softmax minus label", el2n),
    "grand": ScoringMethod("norm of the example's own gradient over all parameters", grand),
    "forgetting": ScoringMethod("how often it was told right and then wrong again", right_answers, needs="labels"),
    "loss": ScoringMethod("its loss", loss),
    "margin": ScoringMethod("by how much another label is likelier than its own", margin, needs="labels"),
    "prototype": ScoringMethod("cosine distance of its embedding to the own k-means centre", prototype),
    "random": ScoringMethod("chance, as a control", random, trained=False),
    "input_norm": ScoringMethod("norm of its pixels, as a control", input_norm, trained=False, needs="inputs"),
}
