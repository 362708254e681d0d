"""Recipes of encoders and encoder-decoders on masked text."""

from thrifty.core import recipe
from thrifty.recipes.language_recipes import bidirectional_techniques
from thrifty.techniques.data_selection.drop_masked_tokens import DropMaskedTokens


def mask_more() -> recipe.Recipe:
    """A small BERT-style encoder that masks half of the tokens and computes only the visible tokens.

    Command   thrifty train mask-more
    Expect    The encoder of six blocks computes 60 % of the tokens, and a decoder of one block computes all tokens. Do
              not compare held-out losses with the held-out losses of `masked`, which predicts 15 % of a text instead
              of 50 %.
    """
    return recipe.Recipe(
        name="mask-more",
        about="A small BERT-style encoder that masks half of the tokens and computes only the visible tokens.",
        model=recipe.ModelSettings(preset="bert-nano", depth=6),
        objective=recipe.ObjectiveSettings("masked_token", rate=0.5),
        data=recipe.DataSettings(source="python-stdlib", length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=(*bidirectional_techniques(lr=1e-3), DropMaskedTokens(blocks=1)),
    )


def mass() -> recipe.Recipe:
    """A small Marian-style encoder-decoder on any text, trained to predict a masked span of half the text.

    Command   thrifty train mass --data my.txt
    """
    return recipe.Recipe(
        name="mass",
        about="A small Marian-style encoder-decoder on any text, trained to predict a masked span.",
        model=recipe.ModelSettings(preset="marian-nano"),
        objective=recipe.ObjectiveSettings("mass"),
        data=recipe.DataSettings(length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=bidirectional_techniques(lr=1e-3),
    )
