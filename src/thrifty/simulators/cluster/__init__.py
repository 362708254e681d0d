"""Simulators of training on clusters: devices and links, collectives, pipeline schedules, memory and timelines.

Devices and links are tables of published figures. Collectives have alpha-beta times. Pipeline schedules are simulated
event by event. Nothing runs on a device, so any cluster size can be simulated."""
