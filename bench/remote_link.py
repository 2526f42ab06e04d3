"""The server that the remote bench talks to: SeaweedFS, as far away as it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parent.parent / "tests"
_HERE = Path(__file__).parent
LINKS = ("packets", "proxy", "none")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bucket is, and where what is measured is kept on this machine; sent to processes.

    Attributes
    ----------
    endpoint, key, secret, bucket
        Of the server.
    folder
        The run's own: `source.bin`, and a folder for each set of files.
    lengths, hidden
        Of the samples in `source.bin`.
    """

    endpoint: str
    key: str
    secret: str
    bucket: str
    folder: Path
    lengths: tuple[int, ...]
    hidden: int

    @property
    def options(self) -> dict[str, Any]:
        """Storage options as fsspec takes them."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}

    def url(self, files: str) -> str:
        """Return where a set of files lies."""
        return f"s3://{self.bucket}/{files}"

    def set_environment(self) -> None:
        """Tell the SDKs in this process, for libraries that take no options."""
        os.environ.update(
            AWS_ACCESS_KEY_ID=self.key,
            AWS_SECRET_ACCESS_KEY=self.secret,
            AWS_REGION="us-east-1",
            AWS_DEFAULT_REGION="us-east-1",
            AWS_ENDPOINT_URL=self.endpoint,
            S3_ENDPOINT_URL=self.endpoint,
            AWS_EC2_METADATA_DISABLED="true",
            AWS_ALLOW_HTTP="true",
        )


class Server:
    """SeaweedFS and the delay before it.

    Parameters
    ----------
    folder
        Takes what it stores.
    rtt
        Seconds of round trip that are added.
    link
        "packets": through a network namespace, see remote_relay.py; "proxy": see remote_proxy.py; "none": without
        delay; "": packets where the system allows that, else the proxy.
    mbit
        What the link carries; 0: whatever comes. Of packets only.

    Attributes
    ----------
    endpoint
        Where clients find it.
    how
        A sentence about the delay.
    """

    def __init__(self, folder: Path, rtt: float, link: str, mbit: float = 0) -> None:
        sys.path.insert(0, str(_TESTS))  # the servers are those of the tests
        from servers.seaweed import Seaweed

        self._relay: subprocess.Popen[str] | None = None
        folder.mkdir()
        prefix: tuple[str, ...] = ()
        ip = "127.0.0.1"
        if link in ("packets", "") and _may_delay_packets():
            namespace, network = f"hsb{os.getpid() % 100_000}", f"10.77.{os.getpid() % 256}"
            self._relay, _ = _start("remote_relay.py", namespace, network, str(rtt), str(mbit))
            prefix, ip = ("ip", "netns", "exec", namespace), f"{network}.2"
            link = "packets"
        elif link == "packets":
            sys.exit("to delay packets it takes root, /dev/net/tun and `ip` of iproute2; say --link proxy")
        try:
            self._seaweed = Seaweed(folder, ip, prefix)
        except BaseException:
            self._stop_relay()
            raise
        self.endpoint, self.host = self._seaweed.endpoint, self._seaweed.host
        if not self._relay and link != "none":
            self._relay, port = _start("remote_proxy.py", self.host, str(rtt))
            self.endpoint, link = f"http://127.0.0.1:{port}", "proxy"
        self.how = _how(link, rtt, mbit)

    def place(self, folder: Path, lengths: tuple[int, ...], hidden: int) -> Place:
        """Make a bucket and return where it is."""
        fs = self._seaweed.file_system()
        fs.mkdir("bench")
        options = self._seaweed.options()
        return Place(self.endpoint, options["key"], options["secret"], "bench", folder, lengths, hidden)

    def stop(self) -> None:
        """End it all."""
        self._seaweed.stop()
        self._stop_relay()

    def _stop_relay(self) -> None:
        if self._relay is not None and self._relay.stdin is not None:
            self._relay.stdin.close()
            self._relay.wait(20)


def _may_delay_packets() -> bool:
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None


def _start(script: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    pipe = subprocess.PIPE
    command = [sys.executable, _HERE / script, *words]
    # A session of its own: an interrupt of the bench is not to end it before it has tidied up.
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{script} does not work")
    return process, line


def _how(link: str, rtt: float, mbit: float) -> str:
    if link == "none":
        return "no latency added"
    if link == "proxy":
        return f"{rtt * 1e3:.0f} ms added by a TCP proxy in Python, which is a bottleneck itself"
    limit = f", {mbit:,.0f} Mbit/s" if mbit else ""
    return f"a link of {rtt * 1e3:.0f} ms round trip{limit}, made of two TUN devices with 64 KiB segments"
