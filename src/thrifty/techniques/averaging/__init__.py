"""Averages of weights over steps."""
