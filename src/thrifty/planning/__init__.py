"""Planning of runs: footprints, step times, plans, scaling laws, and exports to other trainers."""
