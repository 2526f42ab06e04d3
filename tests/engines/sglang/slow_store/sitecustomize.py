"""On the path of a server under test: its local storage takes HSFMT_TEST_BYTES_PER_SECOND, and no more."""

import os
import time

if rate := os.environ.get("HSFMT_TEST_BYTES_PER_SECOND"):
    from hsfmt.storage import local

    _write = local._LocalObjectWriter.write

    def _slow_write(self, data):
        time.sleep(memoryview(data).nbytes / float(rate))
        _write(self, data)

    local._LocalObjectWriter.write = _slow_write
