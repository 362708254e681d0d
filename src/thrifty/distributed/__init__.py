"""Tensor and pipeline parallelism: model partition, stages, communication between stages, fake ranks."""
