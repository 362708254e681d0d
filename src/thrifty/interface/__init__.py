"""The public Python functions."""
