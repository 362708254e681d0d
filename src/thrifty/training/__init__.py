"""The training loop and its surroundings: checkpoints, evaluation, the run folder."""
