"""An export: from a snapshot to the files of another program."""
