"""The public Python interface: functions that users call, over everything else."""
