"""The command line. One file is one verb, holding a click command named `command`; `main.py` has a line on each."""
