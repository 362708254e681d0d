"""Reports: pages and chart images of runs and comparisons. They are built from files, without the training process."""
