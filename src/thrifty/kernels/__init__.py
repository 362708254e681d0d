"""Pure functions on tensors. Plain references of the fast ones are in the tests."""
