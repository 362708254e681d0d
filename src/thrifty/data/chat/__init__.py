"""Conversations: templates, sources, packing."""
