"""Recipes of encoders and encoder–decoders on masked text."""

from thrifty.core import recipe
from thrifty.recipes.language_recipes import bidirectional_techniques
from thrifty.techniques.data_selection.drop_masked_tokens import DropMaskedTokens


def mask_more() -> recipe.Recipe:
    """A small BERT-style encoder that reads no masks: half of the tokens are masked and left out of the encoder.

    Command   thrifty train mask-more
    Expect    The encoder of six blocks reads 60 % of the tokens; a decoder of one block reads all. The held-out loss is
              not comparable with that of `masked`, because it predicts half of a text and not 15 %.
    """
    return recipe.Recipe(
        name="mask-more",
        about="A small BERT-style encoder that reads no masks: half of the tokens are masked and left out.",
        model=recipe.ModelSettings(preset="bert-nano", depth=6),
        objective=recipe.ObjectiveSettings("masked_token", rate=0.5),
        data=recipe.DataSettings(source="python-stdlib", length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=(*bidirectional_techniques(lr=1e-3), DropMaskedTokens(blocks=1)),
    )


def mass() -> recipe.Recipe:
    """A small Marian-style encoder–decoder on any text, trained on a masked half.

    Command   thrifty train mass --data my.txt
    """
    return recipe.Recipe(
        name="mass",
        about="A small Marian-style encoder-decoder on any text, trained on a masked half.",
        model=recipe.ModelSettings(preset="marian-nano"),
        objective=recipe.ObjectiveSettings("mass"),
        data=recipe.DataSettings(length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=bidirectional_techniques(lr=1e-3),
    )
