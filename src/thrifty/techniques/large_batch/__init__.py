"""Large-batch training: enlarge or split the effective batch and adapt the learning rate."""
