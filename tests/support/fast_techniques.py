"""Techniques that recipes use only on machines where they pay; runs compared bit for bit leave them out."""

from thrifty.recipes.language_recipes import text_techniques

_CHOSEN = [each.name for each in text_techniques(lr=1e-3)]
FAST = tuple(name for name in _CHOSEN if name in ("compile", "attention.tiled", "precision.mixed"))
"""Names of these techniques in recipes of causal language models on this machine."""
WITHOUT_FAST = tuple(word for name in FAST for word in ("--without", name))
