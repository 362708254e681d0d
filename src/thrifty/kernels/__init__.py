"""Pure functions on tensors. Each fast version has its plain reference beside it."""
