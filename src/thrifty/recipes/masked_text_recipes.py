"""Encoders, and encoder–decoders, that fill in what is hidden of a text."""

from thrifty.core import recipe
from thrifty.recipes.language_recipes import both_ways
from thrifty.techniques.data_selection.drop_masked_tokens import DropMaskedTokens


def mask_more() -> recipe.Recipe:
    """A small BERT-style encoder that never reads a mask: half of a text is hidden, and left out of it.

    Command   thrifty train mask-more
    Expect    an encoder that goes through 60 % of the tokens, behind it a decoder of one block for six. The held-out
              loss is that of half of a text from the other half: not to be compared with `masked`, at 15 %.
    """
    return recipe.Recipe(
        name="mask-more",
        about="A small BERT-style encoder that never reads a mask: half of a text is hidden, and left out of it.",
        model=recipe.ModelSettings(preset="bert-nano", depth=6),
        objective=recipe.ObjectiveSettings("masked_token", rate=0.5),
        data=recipe.DataSettings(source="python-stdlib", length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=(*both_ways(lr=1e-3), DropMaskedTokens(blocks=1)),
    )


def mass() -> recipe.Recipe:
    """A small encoder–decoder of Marian's kind on any text, by a hidden half that it writes.

    Command   thrifty train mass --data my.txt
    """
    return recipe.Recipe(
        name="mass",
        about="A small encoder-decoder on any text, by a hidden half that it writes.",
        model=recipe.ModelSettings(preset="marian-nano"),
        objective=recipe.ObjectiveSettings("mass"),
        data=recipe.DataSettings(length=128, batch=64),
        budget=recipe.Budget(steps=2000),
        techniques=both_ways(lr=1e-3),
    )
