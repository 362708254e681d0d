"""Weight averaging: evaluate and export a mean of the weights of several steps."""
