"""A proxy between client and server that counts, delays, and does what networks and servers do on bad days.

It runs in a thread of the tests' process, keeps the Host header (which S3 signatures cover), and alters answers, or
gives its own.
"""

import asyncio
import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

PIECE_NBYTES = 1 << 16
KINDS = frozenset(
    {"status", "reset", "short", "stall", "flip", "wrong range", "no range", "new etag", "garbled", "lost"}
)
IN_BODIES = frozenset({"reset", "short", "stall", "flip"})


@dataclass
class Fault:
    """What happens to some requests.

    `kind` is one of KINDS, `status` what a "status" is answered with; `after` counts the bytes of the body that get
    through first (of "flip": before the byte that is flipped). What is "lost" was done, and only its answer is lost. It
    strikes requests whose path `match` is found in, `count` times (None: always), once `skip` of them went through; a
    `method` of "" is any. Answers whose body is too short for it are left alone, and do not count.
    """

    kind: str
    match: str = ""
    count: int | None = 1
    after: int = 0
    skip: int = 0
    status: int = 503
    retry_after: int | None = None
    method: str = "GET"
    struck: int = 0
    seen: int = 0

    def strikes(self, method: str, path: str) -> bool:
        if self.method not in ("", method) or not re.search(self.match, path):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.count is not None and self.struck >= self.count):
            return False
        self.struck += 1
        return True


@dataclass(frozen=True)
class Request:
    """One that came through; `round` is one more than that of any request that had been answered before it came."""

    method: str
    path: str
    range: str
    headers: dict
    round: int


class FaultProxy:
    """Listens at `url`, passes on to `host`."""

    def __init__(self, host: str) -> None:
        self._upstream = host.split(":")
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.in_flight = self.most_in_flight = 0
        self._answered_rounds = 0
        self._n_resets = self._n_unfinished = 0
        self._groups: list[int] = []
        self._grouped = ""
        self._waiting: list[asyncio.Future] = []
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(300)
        self.host = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.url = f"http://{self.host}"

    def reset(self) -> None:
        """Forget faults and requests, also those whose end it has not seen yet, as their answers are on the way."""
        asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result(300)

    async def _reset(self) -> None:
        self.faults.clear()
        self.requests.clear()
        self._n_resets += 1
        self.in_flight = self.most_in_flight = 0
        self._answered_rounds = 0
        self._groups.clear()
        self._let_go()

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def settle(self) -> None:
        """Wait until nothing is in flight, also of before a reset, nor arrived without having been looked at yet."""
        while True:
            asyncio.run_coroutine_threadsafe(_some_rounds(), self._loop).result()
            if not self._n_unfinished:
                return

    def expect_groups(self, *sizes: int, match: str = "") -> None:
        """Answer the next requests only once so many of them are waiting, then so many more, and so on.

        Those whose path `match` is not found in are answered at once.
        """
        self._groups[:] = sizes
        self._grouped = match

    @property
    def groups_left(self) -> int:
        """Groups that are not complete yet."""
        return len(self._groups)

    @property
    def rounds(self) -> int:
        """Requests that could only be made one after another."""
        return max((request.round for request in self.requests), default=0)

    async def gather(self, path: str) -> None:
        """Wait for the other requests of a group."""
        if not self._groups or not re.search(self._grouped, path):
            return
        mine = self._loop.create_future()
        self._waiting.append(mine)
        if len(self._waiting) >= self._groups[0]:
            self._groups.pop(0)
            self._let_go()
        await mine

    def _let_go(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting = []

    def count(self, match: str = "") -> int:
        """Requests whose path `match` is found in."""
        return sum(1 for request in self.requests if re.search(match, request.path))

    def _serve(self, ready: threading.Event) -> None:
        async def start() -> None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20)
            ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

        async def end() -> None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

        self._loop.run_until_complete(end())
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, OSError):
                await _Connection(self, reader, writer).run(*self._upstream)
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()


class _Connection:
    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer

    async def run(self, host: str, port: str) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        try:
            going_on = True
            while going_on:
                line, headers = await _head(self._reader)
                method, path, _ = line.split(" ", 2)
                proxy = self._proxy
                number, n_resets = proxy._answered_rounds + 1, proxy._n_resets
                span = headers.get("range") or headers.get("x-ms-range", "")
                proxy.requests.append(Request(method, path, span, headers, number))
                proxy.in_flight += 1
                proxy._n_unfinished += 1
                proxy.most_in_flight = max(proxy.most_in_flight, proxy.in_flight)
                try:
                    await proxy.gather(path)
                    if up_reader.at_eof():  # the server ended a connection that was not used for long
                        up_writer.transport.abort()
                        up_reader, up_writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
                    fault = next((fault for fault in list(proxy.faults) if fault.strikes(method, path)), None)
                    going_on = await self._pass_on(line, headers, fault, up_reader, up_writer)
                finally:
                    proxy._n_unfinished -= 1
                    if n_resets == proxy._n_resets:
                        proxy.in_flight -= 1
                        proxy._answered_rounds = max(proxy._answered_rounds, number)
        finally:
            up_writer.transport.abort()

    async def _pass_on(self, line: str, headers: dict, fault: Fault | None, up_reader, up_writer) -> bool:
        """Return whether the connection can be used for another request."""
        kind = fault.kind if fault else ""
        nbytes = int(headers.get("content-length", 0))
        if kind == "status":
            if "expect" in headers:  # the client asks before it sends the body, which is not wanted now
                await self._refuse(fault)
                return False
            await self._reader.readexactly(nbytes)
            return await self._refuse(fault, with_body=not line.startswith("HEAD "))
        if kind == "garbled":
            self._writer.write(b"\x16\x03\x01 no answer to this\r\n\r\n")
            await self._writer.drain()
            return False
        if kind == "reset" and not fault.after:
            return self._reset()
        if kind == "no range":
            headers = {name: value for name, value in headers.items() if name != "range"}
        up_writer.write(_encoded(line, headers))
        sending = asyncio.create_task(_copy(self._reader, up_writer, nbytes))
        # A client that died in its body gets no answer, and the server is not to wait for the rest.
        sending.add_done_callback(lambda task: task.cancelled() or (task.exception() and up_writer.transport.abort()))
        answer, answered = await _head(up_reader)
        while " 100 " in answer:
            self._writer.write(_encoded(answer, answered))
            answer, answered = await _head(up_reader)
        if kind == "lost":
            await sending
            return self._reset()
        if kind == "wrong range" and "content-range" in answered:
            answered["content-range"] = re.sub(
                r"bytes (\d+)-(\d+)", lambda m: f"bytes {int(m[1]) + 1}-{int(m[2]) + 1}", answered["content-range"]
            )
        if kind == "new etag":
            answered["etag"] = '"0123456789abcdef"'
        bodiless = line.startswith("HEAD ") or answer.split()[1] in ("204", "304")
        if kind in IN_BODIES and not bodiless and answered.get("transfer-encoding", "").lower() == "chunked":
            up_reader = await _in_one_piece(up_reader, answered)
        self._writer.write(_encoded(answer, answered))
        if not bodiless and answered.get("transfer-encoding", "").lower() == "chunked":
            await _copy_chunked(up_reader, self._writer)
        elif not await self._body(up_reader, 0 if bodiless else int(answered.get("content-length", 0)), fault):
            return False
        await sending
        await self._writer.drain()
        return "close" not in (answered.get("connection", "").lower(), headers.get("connection", "").lower())

    async def _body(self, up_reader: asyncio.StreamReader, nbytes: int, fault: Fault | None) -> bool:
        kind = fault.kind if fault else ""
        if kind not in IN_BODIES or fault.after >= nbytes:
            if kind in IN_BODIES:
                fault.struck -= 1
            await _copy(up_reader, self._writer, nbytes)
            return True
        await _copy(up_reader, self._writer, fault.after)
        if kind == "flip":
            (byte,) = await up_reader.readexactly(1)
            self._writer.write(bytes([byte ^ 0x10]))
            await _copy(up_reader, self._writer, nbytes - fault.after - 1)
            return True
        await self._writer.drain()
        if kind == "stall":
            await self._reader.read(1)  # until the client gives up
        elif kind == "reset":
            self._reset()
        else:
            self._writer.close()
            await self._writer.wait_closed()
        return False

    async def _refuse(self, fault: Fault, *, with_body: bool = True) -> bool:
        code = {503: "SlowDown", 429: "TooManyRequests", 500: "InternalError", 403: "AccessDenied"}.get(
            fault.status, "X"
        )
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        headers = {"content-type": "application/xml", "content-length": str(len(body))}
        if fault.retry_after is not None:
            headers["retry-after"] = str(fault.retry_after)
        self._writer.write(_encoded(f"HTTP/1.1 {fault.status} Injected", headers) + (body if with_body else b""))
        await self._writer.drain()
        return True

    def _reset(self) -> bool:
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        return False


async def _some_rounds() -> None:
    """Let the loop go round as often as it takes from a connection that waits to be accepted to its request."""
    for _ in range(20):
        await asyncio.sleep(0.001)


async def _head(reader: asyncio.StreamReader) -> tuple[str, dict]:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _encoded(line: str, headers: dict) -> bytes:
    return "\r\n".join([line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nbytes: int) -> None:
    while nbytes:
        piece = await reader.read(min(nbytes, PIECE_NBYTES))
        if not piece:
            raise ConnectionError
        writer.write(piece)
        await writer.drain()
        nbytes -= len(piece)


async def _in_one_piece(reader: asyncio.StreamReader, headers: dict) -> asyncio.StreamReader:
    """Read a chunked body; return it as one whose length the headers say."""
    whole = asyncio.StreamReader()
    size = -1
    while size:
        size = int((await reader.readline()).split(b";")[0], 16)
        whole.feed_data((await reader.readexactly(size + 2))[:size])
    whole.feed_eof()
    del headers["transfer-encoding"]
    headers["content-length"] = str(len(whole._buffer))
    return whole


async def _copy_chunked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    size = -1
    while size:
        line = await reader.readline()
        size = int(line.split(b";")[0], 16)
        writer.write(line + await reader.readexactly(size + 2))
        await writer.drain()
