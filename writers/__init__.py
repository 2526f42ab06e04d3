"""Writing: DatasetWriter and what engines and exporters build on it."""
