"""Targets: formats of other programs that a dataset is exported to. Importing this imports no torch."""
