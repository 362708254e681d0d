"""Named data sets: from a registry to a verified folder."""
