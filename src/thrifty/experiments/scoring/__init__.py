"""Scores of training examples: small runs by a recipe say how hard each example is; a file keeps it for other runs."""
