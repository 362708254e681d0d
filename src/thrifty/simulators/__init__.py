"""Simulators of hardware that is not here: clusters and accelerators."""
