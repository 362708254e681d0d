"""The published families of models, one file each."""

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
"""By style."""


def assemble(shape: ModelConfig) -> Model:
    """The model of a shape, on the current default device ("meta" allocates nothing); values not yet initialised."""
    model = FAMILIES[shape.style].assemble(shape)
    tie(model, shape)
    return model


def tie(model: nn.Module, shape: ModelConfig) -> None:
    """Let the head have the token embedding's weight where the shape says so."""
    if shape.tied:
        model.head.weight = model.embedding.token.weight
