"""Pure functions on tensors. Tests contain simple reference implementations of the fast functions."""
