"""The techniques that recipes use only on machines where they pay; runs compared bit for bit leave them out."""

from thrifty.recipes.language_recipes import text_techniques

FAST = tuple(each.name for each in text_techniques(lr=1e-3) if each.name in ("compile", "attention.tiled", "precision.mixed"))
"""Names of those that recipes of causal language models use here."""
WITHOUT_FAST = tuple(word for name in FAST for word in ("--without", name))
