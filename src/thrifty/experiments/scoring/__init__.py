"""Example scoring: short runs of a recipe score the difficulty of each training example; other runs read the file."""
