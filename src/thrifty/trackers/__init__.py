"""Export of a run's records to experiment trackers, by a process that only reads the run folder."""
