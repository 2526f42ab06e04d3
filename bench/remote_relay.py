"""Carry packets between this host and a network namespace, each as late as it is told: a link with a real round trip.

    python bench/remote_relay.py NAMESPACE NETWORK RTT_SECONDS MBIT

NETWORK is what the addresses begin with: .1 is this host, .2 the namespace. There are two TUN devices, to which TCP
hands over segments of up to 64 KiB with their checksums not yet made (TUNSETOFFLOAD), so that a GiB costs some 20,000
reads and writes and this is no bottleneck. Ends with its standard input; namespace and devices go with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_PACKET_NBYTES = 1 << 17
_BURST = 64
_QUEUE_SECONDS = 0.2  # what a router would hold before it drops


def open_tun(name: str) -> int:
    """Return a new TUN device whose packets are large segments behind a virtio_net_hdr."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device


def connect(namespace: str, network: str) -> tuple[int, int]:
    """Make both devices and give them their addresses."""
    names = f"{namespace[:13]}a", f"{namespace[:13]}b"
    devices = open_tun(names[0]), open_tun(names[1])
    inside = ["ip", "-n", namespace]
    run(["ip", "link", "set", names[1], "netns", namespace])
    run([*inside, "link", "set", "lo", "up"])
    for ip, last, name in ((["ip"], 1, names[0]), (inside, 2, names[1])):
        run([*ip, "addr", "add", f"{network}.{last}/30", "dev", name])
        run([*ip, "link", "set", name, "mtu", "9000", "txqueuelen", "10000", "up"])
    return devices


def run(command: Sequence[str]) -> None:
    """Run a command that must not fail."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


class Direction:
    """Packets on their way from one device to the other.

    Parameters
    ----------
    source, target
        The devices.
    delay
        Seconds that each packet is on its way.
    nbytes_a_second
        What the link carries; 0: whatever comes.
    """

    def __init__(self, source: int, target: int, delay: float, nbytes_a_second: float) -> None:
        self.source, self.target, self.delay, self.nbytes_a_second = source, target, delay, nbytes_a_second
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.busy_until = 0.0

    def take(self) -> None:
        """Take what was sent."""
        now = time.monotonic()
        for _ in range(_BURST):
            try:
                packet = os.read(self.source, _PACKET_NBYTES)
            except BlockingIOError:
                return
            at = now
            if self.nbytes_a_second:
                at = max(self.busy_until, now)
                if at - now > _QUEUE_SECONDS:
                    continue
                at = self.busy_until = at + len(packet) / self.nbytes_a_second
            self.under_way.append((at + self.delay, packet))

    def hand_over(self) -> None:
        """Hand over what was under way long enough."""
        now = time.monotonic()
        while self.under_way and self.under_way[0][0] <= now:
            try:
                os.write(self.target, self.under_way[0][1])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EIO):  # of a packet that the kernel does not take
                    raise
            self.under_way.popleft()


def relay(here: int, there: int, rtt: float, mbit: float) -> None:
    """Carry packets until standard input ends."""
    rate = mbit * 1e6 / 8
    directions = {here: Direction(here, there, rtt / 2, rate), there: Direction(there, here, rtt / 2, rate)}
    while True:
        due = min((one.under_way[0][0] for one in directions.values() if one.under_way), default=None)
        seconds = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select([here, there, sys.stdin], [], [], seconds)  # of microseconds, unlike epoll
        for device in readable:
            if device is sys.stdin:
                return
            directions[device].take()
        for one in directions.values():
            one.hand_over()


def main() -> None:
    """Make the namespace, relay, remove it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    namespace, network, rtt, mbit = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    run(["ip", "netns", "add", namespace])
    try:
        devices = connect(namespace, network)
        print("ready", flush=True)
        relay(*devices, rtt, mbit)
    finally:
        run(["ip", "netns", "del", namespace])


if __name__ == "__main__":
    main()
