"""Data selection: train on fewer examples, tokens or patches."""
