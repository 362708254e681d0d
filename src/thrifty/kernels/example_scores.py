"""Scores of single examples: difficulty, or influence on the model. A higher score is a harder example in all of them.

    el2n                 Paul, Ganguli & Dziugaite 2021, Deep Learning on a Data Diet (arXiv 2107.07075)
    grand                the same; at initialization it follows the norm of the input and is useless (Kirsch 2023,
                         Does "Deep Learning on a Data Diet" reproduce?, arXiv 2303.14753)
    margin               distance to the decision, as Sorscher et al. 2022 use it to prune a perceptron's examples
    Forgetting           Toneva et al. 2019, An Empirical Study of Example Forgetting (arXiv 1812.05159)
    prototype_distance   Sorscher et al. 2022, Beyond neural scaling laws (arXiv 2206.14486)

For the softmax cross-entropy of one label, EL2N is the norm of the loss gradient at the logits, which
`Objective.scores` returns for any objective.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from thrifty.core.errors import UsageError

Fields = Mapping[str, Tensor]


def wanted_shares(labels: Tensor, classes: int) -> Tensor:
    """Return labels (n,), or label probabilities (n, c), as probabilities (n, c) in float32."""
    return labels.float() if labels.ndim > 1 else F.one_hot(labels, classes).float()


@torch.no_grad()
def el2n(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the norm of softmax minus one-hot (n,), 0 to sqrt 2, for logits (n, c) and labels (n,) or (n, c)."""
    return (logits.float().softmax(-1) - wanted_shares(labels, logits.shape[-1])).norm(dim=-1)


@torch.no_grad()
def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of the likeliest wrong label minus that of the right one (n,), for logits (n, c), labels
    (n,). The margin is -1 if the right label is certain, and 1 if a wrong one is."""
    probability = logits.float().softmax(-1)
    right = probability.gather(1, labels[:, None]).squeeze(1)
    return probability.scatter(1, labels[:, None], -1.0).amax(1) - right


@torch.no_grad()
def input_norms(inputs: Tensor) -> Tensor:
    """Return the norm of all elements of each input (n, …): (n,) in float32."""
    return inputs.flatten(1).float().norm(dim=1)


def grand(
    loss: Callable[[Fields, Fields], Tensor], parameters: Fields, examples: Fields, chunk: int | None = 32
) -> Tensor:
    """Return the norm of each example's own gradient over all parameters (n,), in float32.

    `loss(parameters, example)` returns the loss (scalar) of one example, whose fields have no batch dimension. It must
    consist of operations that torch.func can batch, without random numbers. Every field of `examples` has n rows. The
    gradients of `chunk` examples exist at a time, which affects memory and time but not values.
    """
    detached = {name: parameter.detach() for name, parameter in parameters.items()}

    def norm_of_one(example: Fields) -> Tensor:
        gradients = grad(loss)(detached, example)
        return torch.stack([gradient.float().square().sum() for gradient in gradients.values()]).sum().sqrt()

    return vmap(norm_of_one, chunk_size=chunk)(dict(examples)).detach()


class ForgettingCounter:
    """A counter of how often each of n examples was classified right at one check and wrong at the next."""

    def __init__(self, n: int):
        self.checks, self.times = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
        self.known, self.ever = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)

    def update(self, rows: Tensor, right: Tensor) -> None:
        """Record whether the examples `rows` (b,), all different, are classified right (b,) now."""
        right = right.bool()
        self.times[rows] += (self.known[rows] & ~right).long()
        self.checks[rows] += 1
        self.known[rows] = right
        self.ever[rows] |= right

    def scores(self) -> Tensor:
        """Return how often each example was forgotten (n,), in float32.

        An example that was never classified right counts as forgotten at every check, more than any other can be.
        """
        return torch.where(self.ever, self.times, self.checks).float()


def prototype_distance(embeddings: Tensor, k: int, seed: int, attempts: int = 4) -> Tensor:
    """Return the cosine distance (n,), 0 … 2, of each embedding (n, d) to the center of its cluster.

    k-means finds `k` clusters among unit embeddings: the best of `attempts`, reproducible by `seed`. Raises UsageError
    if scikit-learn is missing, or if there are fewer examples than clusters.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise UsageError(
            "distances to prototypes require scikit-learn, which is not installed",
            fix="pip install 'thrifty[pruning]'",
        ) from None
    if not 1 <= k <= len(embeddings):
        raise UsageError(
            f"{len(embeddings)} examples cannot make {k} clusters", fix=f"choose from 1 to {len(embeddings)} clusters"
        )
    unit = F.normalize(embeddings.detach().float().cpu(), dim=1)
    clusters = KMeans(k, n_init=attempts, random_state=seed).fit(unit.numpy())
    centres = F.normalize(torch.from_numpy(clusters.cluster_centers_).float(), dim=1)
    return 1 - (unit * centres[torch.from_numpy(clusters.labels_).long()]).sum(1)
