"""Live pages over run folders, read-only and local. Training code does not depend on it."""
