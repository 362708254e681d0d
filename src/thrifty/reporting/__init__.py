"""From a run folder to one offline page and a few pictures; reads files only, never the training process."""
