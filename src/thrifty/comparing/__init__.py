"""Techniques and combinations held against each other: checked (`check`) and raced (`compare`)."""
