"""Registers the data types where zarr-python does not do it itself.

zarr-python 3.1 to 3.3 collect the entry points of `zarr.data_type` and never load them; 3.4 does. What all of them load
when they open a group is the entry points of `zarr.buffer`. Ours there names the class below, zarr's own buffer, which
is registered already: loading it changes nothing but that this module runs.

So a dataset opens at its root, and at any group in it. Only an array opened directly, by its own path, needs
`import hsfmt.zarr_plugin` first with a zarr-python older than 3.4.
"""

from __future__ import annotations

from zarr.core.buffer.cpu import Buffer

from hsfmt.zarr_dtypes import register

__all__ = ["Buffer"]

register()
