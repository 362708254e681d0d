"""Models and examples that are smaller at first, and what is carried over when they grow."""
