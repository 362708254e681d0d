"""Simulators of training on clusters: devices and links, collectives, pipeline schedules, memory and timelines.

Devices and links are tables of published figures, collectives alpha-beta times, and schedules data that are simulated
event by event. Nothing runs on a device, so any cluster size costs only arithmetic."""
