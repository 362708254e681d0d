"""The supported families of published models, one file each."""

from torch import nn

from thrifty.models.families.bert import Bert
from thrifty.models.families.clip import CLIP
from thrifty.models.families.gpt import GPT1, GPT2
from thrifty.models.families.llama import Llama
from thrifty.models.families.marian import Marian
from thrifty.models.families.model_family import Model, ModelFamily
from thrifty.models.families.t5 import T5
from thrifty.models.families.vit import ViT
from thrifty.models.families.vit_mae import ViTMAE
from thrifty.models.model_config import ModelConfig

FAMILIES: dict[str, ModelFamily] = {
    family.style: family for family in (GPT2(), GPT1(), Llama(), Bert(), T5(), Marian(), ViT(), CLIP(), ViTMAE())
}
"""Model families by `ModelConfig.style`, such as "llama"."""


def assemble(shape: ModelConfig) -> Model:
    """Return the uninitialized model that the config `shape` describes, on the current default device ("meta" allocates
    nothing)."""
    model = FAMILIES[shape.style].assemble(shape)
    tie(model, shape)
    return model


def tie(model: nn.Module, shape: ModelConfig) -> None:
    """Share the token embedding's weight with the head if the config `shape` requires it."""
    if shape.tied:
        model.head.weight = model.embedding.token.weight
