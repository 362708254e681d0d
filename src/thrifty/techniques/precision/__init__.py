"""Low-precision training: use 16 or 8 bits for products, weights and optimizer state."""
