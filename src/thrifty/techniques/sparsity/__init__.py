"""Sparse training and pruning: train with few of the weights, heads or neurons."""
