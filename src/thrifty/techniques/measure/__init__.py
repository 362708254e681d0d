"""Measurements of training that change no update."""
