"""A model over several ranks: split within layers, cut between blocks, and what its parts say to each other."""
