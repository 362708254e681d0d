"""The loop that trains, and all that is wrapped around it: checkpoints, evaluation, the run folder."""
