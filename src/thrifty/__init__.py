"""Thrifty trains Transformers with less compute, memory and data, and proves it."""

__version__ = "0.1.0"
