"""Simulators of hardware: clusters and accelerators."""
