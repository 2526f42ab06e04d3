"""Uploads to object stores that a killed writer left: no listing shows them, and they are paid for.

Spec: rule GC-8. Nothing committed is ever part of one.
"""

from __future__ import annotations

import logging

from hsfmt.errors import StorageError
from hsfmt.maintenance.collect_plan import Keep
from hsfmt.storage import Store

_log = logging.getLogger("hsfmt")

Aged = tuple[tuple[str, float], ...]


def abort_uploads(store: Store, keep: Keep, *, dry_run: bool) -> tuple[Aged, Aged]:
    """Abort the uploads of a dataset in which nothing has arrived for long enough.

    Returns
    -------
    tuple
        (path, seconds since anything arrived) of those that were aborted (of a dry run: would be), and of the young.
    """
    try:
        found = store.unfinished_uploads()
    except StorageError as error:  # a permission of its own, that a collection can do without
        _log.warning("%s: unfinished uploads can't be listed: %s", store.url, error)
        return (), ()
    old = [upload for upload in found if keep.now - upload.at >= keep.least_age]
    young = [upload for upload in found if keep.now - upload.at < keep.least_age]
    if not dry_run:
        for upload in old:
            store.abort_upload(upload)
    return (
        tuple((upload.path, keep.now - upload.at) for upload in old),
        tuple((upload.path, keep.now - upload.at) for upload in young),
    )
