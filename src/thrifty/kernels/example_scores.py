"""Scores of single examples: difficulty, or influence on the model. A higher score always means a harder example.

    el2n                 Paul, Ganguli & Dziugaite 2021, Deep Learning on a Data Diet (arXiv 2107.07075)
    grand                same paper as el2n; useless at initialization, because it then follows the input norm (Kirsch
                         2023, Does "Deep Learning on a Data Diet" reproduce?, arXiv 2303.14753)
    margin               distance to the decision boundary, as in Sorscher et al. 2022 for a perceptron
    Forgetting           Toneva et al. 2019, An Empirical Study of Example Forgetting (arXiv 1812.05159)
    prototype_distance   Sorscher et al. 2022, Beyond neural scaling laws (arXiv 2206.14486)

For the softmax cross-entropy of one label, EL2N is the norm of the loss gradient at the logits. `Objective.scores`
returns this norm for any objective.
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
    """Return the norm of softmax minus one-hot (n,), from 0 to sqrt 2, for logits (n, c) and labels (n,) or (n, c)."""
    return (logits.float().softmax(-1) - wanted_shares(labels, logits.shape[-1])).norm(dim=-1)


@torch.no_grad()
def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the largest probability of a wrong label minus the probability of the right label (n,), for logits (n, c)
    and labels (n,). The margin is -1 if the right label is certain, and 1 if a wrong label is certain.
    """
    probability = logits.float().softmax(-1)
    right = probability.gather(1, labels[:, None]).squeeze(1)
    return probability.scatter(1, labels[:, None], -1.0).amax(1) - right


@torch.no_grad()
def input_norms(inputs: Tensor) -> Tensor:
    """Return the norm (n,) of all elements of each input (n, …), in float32."""
    return inputs.flatten(1).float().norm(dim=1)


def grand(
    loss: Callable[[Fields, Fields], Tensor], parameters: Fields, examples: Fields, chunk: int | None = 32
) -> Tensor:
    """Return the norm (n,) of each example's own gradient over all parameters, in float32.

    `loss(parameters, example)` returns the scalar loss of one example, whose fields have no batch dimension. `loss`
    must use only operations that torch.func can batch, and no random numbers. Every field of `examples` has n rows.
    Gradients of `chunk` examples exist at a time. `chunk` affects memory and time, not values.
    """
    detached = {name: parameter.detach() for name, parameter in parameters.items()}

    def norm_of_one(example: Fields) -> Tensor:
        gradients = grad(loss)(detached, example)
        return torch.stack([gradient.float().square().sum() for gradient in gradients.values()]).sum().sqrt()

    return vmap(norm_of_one, chunk_size=chunk)(dict(examples)).detach()


class ForgettingCounter:
    """Counter of forgetting events: an example is classified right at one check and wrong at the next."""

    def __init__(self, n: int):
        self.checks, self.times = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
        self.known, self.ever = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)

    def update(self, rows: Tensor, right: Tensor) -> None:
        """Record which of the examples with the distinct indices `rows` (b,) are now classified right (b,)."""
        right = right.bool()
        self.times[rows] += (self.known[rows] & ~right).long()
        self.checks[rows] += 1
        self.known[rows] = right
        self.ever[rows] |= right

    def scores(self) -> Tensor:
        """Return the number of times each example was forgotten (n,), in float32.

        An example that was never classified right counts as forgotten at every check. If all examples are checked
        equally often, this score exceeds the scores of all other examples.
        """
        return torch.where(self.ever, self.times, self.checks).float()


def prototype_distance(embeddings: Tensor, k: int, seed: int, attempts: int = 4) -> Tensor:
    """Return the cosine distance (n,), from 0 to 2, of each embedding (n, d) to the center of its cluster.

    k-means finds `k` clusters among normalized embeddings, and the best of `attempts` runs is used. The same `seed`
    gives the same clusters. Raises UsageError without scikit-learn, or if there are fewer examples than clusters.
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
            f"{len(embeddings)} examples cannot form {k} clusters", fix=f"choose from 1 to {len(embeddings)} clusters"
        )
    unit = F.normalize(embeddings.detach().float().cpu(), dim=1)
    clusters = KMeans(k, n_init=attempts, random_state=seed).fit(unit.numpy())
    centres = F.normalize(torch.from_numpy(clusters.cluster_centers_).float(), dim=1)
    return 1 - (unit * centres[torch.from_numpy(clusters.labels_).long()]).sum(1)
