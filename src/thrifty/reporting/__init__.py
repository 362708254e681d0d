"""Reports: one offline page and chart images from a run folder. Reads files only, never the training process."""
