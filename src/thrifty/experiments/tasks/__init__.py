"""Training tasks shared by several studies."""
