"""Board: local, read-only live pages for run folders. Training code does not depend on this package."""
