"""Accelerator simulators: one engine for all designs, machines as data, the same masks for each design.

`attention_trace.py` and `spgemm_workload.py` hold workloads, `accelerator_spec.py` machines, and `designs/` the rules
of papers. `scan_engine.py` and `event_engine.py` compute times, `energy_model.py` energy, `accelerator_simulation.py`
both together, and `simulation_result.py` holds the results. `design_filters.py` applies each design's filter;
`published_claims.py` compares with published figures."""
