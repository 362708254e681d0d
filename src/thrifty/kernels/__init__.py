"""Pure functions on tensors. Tests contain plain reference implementations of the fast functions."""
