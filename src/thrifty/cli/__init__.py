"""The command line. Each file defines one verb, a click command named `command`. `verb_list.py` describes all verbs."""
