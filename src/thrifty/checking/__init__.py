"""Check whether a combination of techniques keeps its promises."""
