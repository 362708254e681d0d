"""Memories other than the device's, and what stands for a tensor that is there."""
