"""Scores of single examples: how hard each is, or how much it would move the model. Higher is harder in all of them.

    el2n                 Paul, Ganguli & Dziugaite 2021, Deep Learning on a Data Diet (arXiv 2107.07075)
    grand                the same; at first values it follows the norm of the input and finds nothing (Kirsch 2023,
                         Does "Deep Learning on a Data Diet" reproduce?, arXiv 2303.14753)
    margin               the distance to the decision, as Sorscher et al. 2022 prune a perceptron's examples by it
    Forgetting           Toneva et al. 2019, An Empirical Study of Example Forgetting (arXiv 1812.05159)
    prototype_distance   Sorscher et al. 2022, Beyond neural scaling laws (arXiv 2206.14486)

For the softmax cross-entropy of one label, EL2N is the norm of the loss gradient at the logits, which is what
`Objective.scores` gives for any objective.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from thrifty.core.errors import UsageError

Fields = Mapping[str, Tensor]


def wanted_shares(labels: Tensor, classes: int) -> Tensor:
    """Labels (n,), or shares of labels (n, c), as shares (n, c) in float32."""
    return labels.float() if labels.ndim > 1 else F.one_hot(labels, classes).float()


@torch.no_grad()
def el2n(logits: Tensor, labels: Tensor) -> Tensor:
    """The norm of softmax minus one-hot (n,), between 0 and sqrt 2, for logits (n, c) and labels (n,) or (n, c)."""
    return (logits.float().softmax(-1) - wanted_shares(labels, logits.shape[-1])).norm(dim=-1)


@torch.no_grad()
def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """How far the likeliest of the other labels is ahead of the right one, in probability (n,): -1 where the right one
    is certain, 1 where a wrong one is. Logits (n, c), labels (n,)."""
    share = logits.float().softmax(-1)
    right = share.gather(1, labels[:, None]).squeeze(1)
    return share.scatter(1, labels[:, None], -1.0).amax(1) - right


@torch.no_grad()
def input_norms(inputs: Tensor) -> Tensor:
    """The norm of all values of each input (n, …): (n,) in float32."""
    return inputs.flatten(1).float().norm(dim=1)


def grand(
    loss: Callable[[Fields, Fields], Tensor], parameters: Fields, examples: Fields, chunk: int | None = 32
) -> Tensor:
    """The norm of each example's own gradient over all parameters (n,), in float32.

    `loss(parameters, example)` gives the loss (scalar) of one example, whose fields have no dimension of examples; it
    must be made of operations that torch.func can batch, and draw nothing at random. Of `examples` every field has n
    rows. The gradients of `chunk` examples exist at a time, which decides about memory and time and not about values.
    """
    detached = {name: parameter.detach() for name, parameter in parameters.items()}

    def norm_of_one(example: Fields) -> Tensor:
        gradients = grad(loss)(detached, example)
        return torch.stack([gradient.float().square().sum() for gradient in gradients.values()]).sum().sqrt()

    return vmap(norm_of_one, chunk_size=chunk)(dict(examples)).detach()


class ForgettingCounter:
    """Counts how often each of n examples was told right at one look and wrong at the next."""

    def __init__(self, n: int):
        self.looks, self.times = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
        self.known, self.ever = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)

    def update(self, rows: Tensor, right: Tensor) -> None:
        """Whether the examples `rows` (b,), all different, are told right (b,) now."""
        right = right.bool()
        self.times[rows] += (self.known[rows] & ~right).long()
        self.looks[rows] += 1
        self.known[rows] = right
        self.ever[rows] |= right

    def scores(self) -> Tensor:
        """How often each was forgotten (n,), in float32. What was never told right counts as forgotten at every look,
        more than any other can have been."""
        return torch.where(self.ever, self.times, self.looks).float()


def prototype_distance(embeddings: Tensor, k: int, seed: int, attempts: int = 4) -> Tensor:
    """The cosine distance (n,), 0 … 2, of each embedding (n, d) to the centre of its own cluster, of `k` that k-means
    finds among embeddings of length 1; the best of so many attempts, the same for the same seed.

    Raises UsageError where scikit-learn is not installed, or there are fewer examples than clusters.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise UsageError(
            "distances to prototypes need scikit-learn, which is not installed", fix="pip install 'thrifty[pruning]'"
        ) from None
    if not 1 <= k <= len(embeddings):
        raise UsageError(f"{len(embeddings)} examples cannot make {k} clusters", fix="give 1 or more, and not so many")
    unit = F.normalize(embeddings.detach().float().cpu(), dim=1)
    clusters = KMeans(k, n_init=attempts, random_state=seed).fit(unit.numpy())
    centres = F.normalize(torch.from_numpy(clusters.cluster_centers_).float(), dim=1)
    return 1 - (unit * centres[torch.from_numpy(clusters.labels_).long()]).sum(1)
