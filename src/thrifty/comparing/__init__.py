"""Comparison of variants (`compare`): protocol, runs, statistics and verdicts."""
