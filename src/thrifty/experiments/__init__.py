"""Studies: framework, tasks, scoring, lottery tickets, past results."""
