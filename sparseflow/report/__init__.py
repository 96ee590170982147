"""One HTML page of a run's evidence: benchmark results and route traces as charts."""
