"""How fast a storage answers, as measured on the way, and what follows for near ranges."""

from __future__ import annotations

_SMALLEST_GAP_NBYTES = 128 << 10
_LARGEST_GAP_NBYTES = 8 << 20
_FIRST_GAP_NBYTES = 1 << 20
_LONG_BODY_NBYTES = 512 << 10
_WEIGHT = 0.1  # of the newest figure in the running mean
_FORGETTING = 1.02  # a request: latency may grow, if slowly


class Pace:
    """The least time to the first byte of late, and a running mean of the throughput of one request.

    The least, since a busy link makes requests wait for each other, which is no latency.
    """

    def __init__(self) -> None:
        self._latency_seconds = 0.0
        self._nbytes_a_second = 0.0

    def note(self, nbytes: int, first_byte_seconds: float | None, seconds: float) -> None:
        """Take a request into account.

        Parameters
        ----------
        nbytes
            Bytes of its body.
        first_byte_seconds
            Until its body began; None where that is not known.
        seconds
            Until it ended.
        """
        if first_byte_seconds is None:
            return
        self._latency_seconds = min(self._latency_seconds * _FORGETTING or first_byte_seconds, first_byte_seconds)
        if nbytes >= _LONG_BODY_NBYTES and seconds > first_byte_seconds:
            self._nbytes_a_second = _mean(self._nbytes_a_second, nbytes / (seconds - first_byte_seconds))

    @property
    def gap_nbytes(self) -> int:
        """Bytes that arrive in the time that another request would take to be answered."""
        if not self._nbytes_a_second:
            return _FIRST_GAP_NBYTES
        gap = int(self._latency_seconds * self._nbytes_a_second)
        return min(max(gap, _SMALLEST_GAP_NBYTES), _LARGEST_GAP_NBYTES)


def _mean(former: float, newest: float) -> float:
    return newest if not former else former + _WEIGHT * (newest - former)
