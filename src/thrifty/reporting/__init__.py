"""Reports: one offline page and chart images from a run folder. They read only files, never the training process."""
