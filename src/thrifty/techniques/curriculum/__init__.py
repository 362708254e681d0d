"""Smaller examples first: resolution, patch size, sequence length, low frequencies."""
