"""Experiments of many small runs: what a study is, how it is run, summarised, drawn, kept and compared."""
