"""Accelerators that are not here, simulated: one engine for all designs, machines as data, the same masks for each.

`trace.py` and `spgemm.py` what is computed, `machine.py` on what, `designs/` how (the only files
with rules of a paper), `engine.py` and `events.py` when, `energy.py` at what cost, `simulate.py` all of it
together, `result.py` what came out, `own_filters.py` what each design would keep, `published.py` what papers say."""
