"""Few groups in which every two of many meet: a covering array, greedily."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

Group = tuple[str, ...]
Fits = Callable[[Group], bool]


def covering(names: Sequence[str], fits: Fits, most: int) -> list[Group]:
    """Groups of at most `most`, in the order of `names`, that fit; every two names that fit are in one of them."""
    left = {frozenset(pair) for pair in combinations(names, 2) if fits(pair)}
    partners = {name: {other for other in names if {name, other} in left} for name in names}
    groups = []
    while left:
        open_for = Counter(name for pair in left for name in pair)
        group = (max(names, key=lambda name: open_for[name]),)
        able = partners[group[0]]
        while len(group) < most:
            meets = {name: sum({name, member} in left for member in group) for name in able}
            best_first = sorted(
                (name for name in names if meets.get(name)), key=lambda name: (-meets[name], -open_for[name])
            )
            longer = (tuple(name for name in names if name in (*group, other)) for other in best_first)
            group, before = next(filter(fits, longer), group), group
            if group == before:
                break
            able = able & partners[next(name for name in group if name not in before)]
        left -= {frozenset(pair) for pair in combinations(group, 2)}
        groups.append(group)
    return groups


def around(name: str, others: Iterable[str], fits: Fits, most: int) -> list[Group]:
    """Groups of at most `most` that begin with `name` and fit; every other that fits it is in one of them."""
    groups: list[Group] = []
    for other in others:
        for number, group in enumerate(groups):
            if len(group) < most and fits((*group, other)):
                groups[number] = (*group, other)
                break
        else:
            if fits((name, other)):
                groups.append((name, other))
    return groups
