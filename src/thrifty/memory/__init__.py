"""Memory of saved activations: operation traces, saved-tensor hooks, recompute schedules, offload tiers."""
