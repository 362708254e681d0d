"""A size that rises in steps as a run goes on."""


def phased_size(step: int, start: float, full: int, until: int, multiple: int, phases: int) -> int:
    """The size at this step: from `start` to `full` in `phases` equal phases over `until` steps, in multiples of
    `multiple`, at least one of them and at most `full`."""
    if step >= until:
        return full
    wanted = start + (full - start) * (step * phases // until) / phases
    return min(max(round(wanted / multiple), 1) * multiple, full)
