"""The training of large models simulated on one box: devices and links as tables of published numbers, collectives as
alpha-beta times, pipeline schedules as data that are played event by event, and the timeline to look at. Nothing here
is run on a device, so a cluster of any size costs the time of its arithmetic."""
