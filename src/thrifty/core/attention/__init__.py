"""Attention cores of any model: where they are, how another takes their place, how one is calibrated during a run."""
