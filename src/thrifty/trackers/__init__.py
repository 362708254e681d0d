"""What a run recorded, written as other trackers have it, by a process of its own that only reads the run folder."""
