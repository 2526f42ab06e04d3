"""Makes `program` importable from the folders below."""
