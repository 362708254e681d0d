"""A live page over run folders, read-only and on this machine alone; what trains knows nothing of it."""
