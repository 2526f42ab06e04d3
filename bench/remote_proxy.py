"""A TCP proxy that passes everything on late, for hosts where no packets can be delayed.

    python bench/remote_proxy.py HOST:PORT RTT_SECONDS

Says on standard output where it listens, and ends with its standard input. It costs CPU time, and its connections open
without delay: figures that were measured through it say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

_PIECE_NBYTES = 1 << 18
_PIECES_UNDER_WAY = 256


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Write what is read, each piece as late as that."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES_UNDER_WAY)

    async def write() -> None:
        while True:
            due, piece = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if not piece:
                return
            writer.write(piece)
            await writer.drain()

    writing = asyncio.create_task(write())
    piece = b"-"
    while piece and not writing.done():
        piece = await reader.read(_PIECE_NBYTES)
        await under_way.put((loop.time() + delay, piece))
    await writing
    with contextlib.suppress(OSError):
        writer.write_eof()


async def serve(host: str, port: int, delay: float) -> None:
    """Serve until standard input ends."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(host, port, limit=_PIECE_NBYTES)
        with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled at the end, as all are
            await asyncio.gather(pass_on(reader, to_there, delay), pass_on(there, writer, delay))
        to_there.close()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=_PIECE_NBYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    where, rtt = sys.argv[1], float(sys.argv[2])
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(where.partition(":")[0], int(where.partition(":")[2]), rtt / 2))
