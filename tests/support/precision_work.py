"""Small models of every kind with an objective and a batch, for tests of number formats."""

from collections.abc import Callable

import torch
from tiny_models import FAMILIES, TWO_SIDED, random_model
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM, HuggingFaceMaskedLM, HuggingFaceModel, HuggingFaceSeq2Seq
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.classification import Classification
from thrifty.objectives.masked_token import MaskedToken
from thrifty.objectives.next_token import NextToken
from thrifty.objectives.sequence_to_sequence import SequenceToSequence

Case = tuple[nn.Module, Objective, Batch]
VOCABULARY = 300
WRAPPERS = {"bert": HuggingFaceMaskedLM, "t5": HuggingFaceSeq2Seq, "marian": HuggingFaceSeq2Seq}
FOREIGN = ("gpt2", "llama", "bert", "t5-1.0", "marian")


def drawn(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def posed(kind: str) -> tuple[Objective, dict[str, Tensor]]:
    """Return an objective and the fields of four examples for a kind of model."""
    if kind == "bert":
        places = torch.tensor([[1, 5, 6]]).expand(4, 3)
        return MaskedToken(), {"tokens": drawn(4, 16), "places": places, "targets": drawn(4, 3)}
    if kind in ("t5", "marian"):
        keep = torch.arange(12)[None] < torch.tensor([[12], [7], [12], [3]])
        return SequenceToSequence(), {"source": drawn(4, 12), "tokens": drawn(4, 9), "source_keep": keep}
    return NextToken(), {"tokens": drawn(4, 17)}


def own(style: str) -> Case:
    shape = ModelConfig(style, 2, 32, 4, 2 if style == "llama" else 4, 64, VOCABULARY, 16, True)  # type: ignore[arg-type]
    model = assemble(shape)
    initialize(model, 0, std=0.1)
    objective, fields = posed(style)
    return model, objective, Batch(fields, torch.full((4,), 0.25))


def foreign(name: str) -> Case:
    config = (FAMILIES | TWO_SIDED)[name]()
    wrap: type[HuggingFaceModel] = WRAPPERS.get(config.model_type, HuggingFaceCausalLM)
    objective, fields = posed(config.model_type)
    return wrap(random_model(config)), objective, Batch(fields, torch.full((4,), 0.25))


def classifier() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    inputs = torch.randn(4, 8)
    return (
        model,
        Classification(),
        Batch({"inputs": inputs, "labels": torch.tensor([0, 1, 2, 1])}, torch.full((4,), 0.25)),
    )


CASES: dict[str, Callable[[], Case]] = {
    **{style: (lambda style=style: own(style)) for style in ("llama", "gpt", "gpt1", "bert", "t5", "marian")},
    **{f"{name} of transformers": (lambda name=name: foreign(name)) for name in FOREIGN},
    "classifier": classifier,
}
