"""Accelerators that are not here, simulated: one engine for all designs, machines as data, the same masks for each.

`attention_trace.py` and `spgemm_workload.py` what is computed, `accelerator_spec.py` on what, `designs/` how (the only
files with rules of a paper), `scan_engine.py` and `event_engine.py` when, `energy_model.py` at what cost,
`accelerator_simulation.py` all of it together, `simulation_result.py` what came out, `design_filters.py` what each
design would keep, `published_claims.py` what papers say."""
