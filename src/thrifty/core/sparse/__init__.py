"""Weights under masks, and models that lose heads and neurons for good."""
