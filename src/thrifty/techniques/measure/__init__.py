"""Training measurements: record statistics without changing updates."""
