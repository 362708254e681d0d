"""Accelerator simulators: the same engines and the same masks for all designs; each machine is a TOML file.

`attention_trace.py` and `spgemm_workload.py` define workloads, `accelerator_spec.py` machines. `designs/` implements
mechanisms from papers. `scan_engine.py` and `event_engine.py` compute times, `energy_model.py` computes energy.
`accelerator_simulation.py` combines both in the results of `simulation_result.py`. `design_filters.py` applies each
design's filter. `published_claims.py` compares simulations with published figures.
"""
