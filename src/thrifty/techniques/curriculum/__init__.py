"""Curricula: train on shorter texts, smaller images or larger patches first."""
