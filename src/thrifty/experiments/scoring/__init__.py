"""Example scoring: short runs of a recipe score the difficulty of each training example. Other runs read the scores."""
