"""The command line. One file is one verb, holding a click command named `command`; the folder is the list of verbs."""
