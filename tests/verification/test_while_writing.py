"""Verification beside writers that commit and seal: what is in flight is not wrong."""

import threading

from hsfmt import seal
from hsfmt.readers.verification import verify


def test_a_dataset_that_grows_is_never_wrong(dataset, add_part):
    stop = threading.Event()
    failures = []

    def grow():
        number = 0
        try:
            while not stop.is_set():
                add_part(dataset, f"late-{number}", sample_id=f"late-{number}", seal=False)
                seal(dataset)
                number += 1
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        reports = []
        # However slow the other thread is, some of what it does falls into a verification.
        while len(reports) < 18 or (reports[-1].counts.parts <= 4 and thread.is_alive()):
            reports += [verify(dataset, level=level) for level in ("quick", "complete", "full")]
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert [finding for report in reports for finding in report.errors] == []
    assert reports[-1].counts.parts > 4
    assert verify(dataset, level="full").problems == ()


def test_a_snapshot_sealed_after_the_listing_may_name_later_parts(dataset, add_part, monkeypatch):
    from hsfmt.storage.local import LocalStore

    walk = LocalStore.walk

    def late(self, prefix):
        monkeypatch.setattr(LocalStore, "walk", walk)
        add_part(dataset, "between", seal=True)
        return walk(self, prefix)

    monkeypatch.setattr(LocalStore, "walk", late)
    assert verify(dataset, level="full").problems == ()
    assert verify(dataset, level="full").counts.parts == 3
