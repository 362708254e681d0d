"""Pure functions on tensors. Plain references of the fast ones are with the tests."""
