"""The command line: `hsfmt convert`, `verify`, `info`, `ls`, `seal`, `cat`."""
