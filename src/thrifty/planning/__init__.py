"""Planning: footprints, step times and plans of runs, scaling laws, and exports to other trainers."""
