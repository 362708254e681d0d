"""Schedule of a text length or image side that grows in phases during a run."""


def phased_size(step: int, start: float, full: int, until: int, multiple: int, phases: int) -> int:
    """Return the size at a step. The size grows to `full` in `phases` equal phases over `until` steps.

    Sizes are multiples of `multiple`, at least `multiple` and at most `full`.
    """
    if step >= until:
        return full
    exact = start + (full - start) * (step * phases // until) / phases
    return min(max(round(exact / multiple), 1) * multiple, full)
