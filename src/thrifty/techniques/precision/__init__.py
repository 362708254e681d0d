"""Low-precision training: use 16 or 8 bits for matmuls, weights and optimizer state."""
