"""Checks that a combination of techniques keeps its promises."""
