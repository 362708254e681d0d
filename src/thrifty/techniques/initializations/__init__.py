"""Initialization and residual scaling: train deep models stably, with or without norms."""
