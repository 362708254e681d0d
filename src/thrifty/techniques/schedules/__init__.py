"""Learning-rate schedules: warm up and decay the learning rate over a run."""
