"""Memory reduction: recompute, compress, offload or share what training stores."""
