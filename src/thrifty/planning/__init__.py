"""What a run can cost: this machine measured, footprints predicted."""
