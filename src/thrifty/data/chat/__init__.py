"""Chat data: templates, sources and packing of conversations."""
