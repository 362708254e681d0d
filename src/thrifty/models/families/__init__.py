"""The published families of models, one file each."""

from torch import nn

from thrifty.models.families.bert import Bert
from thrifty.models.families.clip import Clip
from thrifty.models.families.gpt import GPT1, GPT2
from thrifty.models.families.llama import Llama
from thrifty.models.families.marian import Marian
from thrifty.models.families.model_family import Family, Model
from thrifty.models.families.t5 import T5
from thrifty.models.families.vit import ViT
from thrifty.models.families.vit_mae import ViTMAE
from thrifty.models.model_config import Shape

FAMILIES: dict[str, Family] = {
    family.style: family for family in (GPT2(), GPT1(), Llama(), Bert(), T5(), Marian(), ViT(), Clip(), ViTMAE())
}
"""By style."""


def assemble(shape: Shape) -> Model:
    """The model of a shape, on the current default device ("meta" allocates nothing); values not yet initialised."""
    model = FAMILIES[shape.style].assemble(shape)
    tie(model, shape)
    return model


def tie(model: nn.Module, shape: Shape) -> None:
    """Let the head have the token embedding's weight where the shape says so."""
    if shape.tied:
        model.head.weight = model.embedding.token.weight
