"""Microsoft's emulator of Azure's storage: Azurite, which npm installs (`make .azurite/.installed`)."""

import base64
import datetime as dt
import os
import re
import shutil
from pathlib import Path

from servers.child_process import ServerProgram, started

ACCOUNT = "hsfmtaccount"
PROGRAM = Path(__file__).resolve().parents[2] / ".azurite/node_modules/azurite/dist/src/blob/main.js"
NOT_RUN = (
    "the tests of Azure: NOT RUN, no Azurite installed"
    f"{'' if shutil.which('npm') else ', and no npm to install it with'}: make .azurite/.installed"
)


def is_installed() -> bool:
    """Whether there is a server to start."""
    return PROGRAM.is_file() and shutil.which("node") is not None


class Azurite:
    """One process, with one account, whose key nobody else knows."""

    def __init__(self, folder: Path) -> None:
        self.key = base64.b64encode(os.urandom(48)).decode()
        self._program = started(lambda: self._start(folder))

    def _start(self, folder: Path) -> ServerProgram:
        # It has no check of the version that the SDK asks for, which is newer than what it knows of.
        argv = [
            "env", f"AZURITE_ACCOUNTS={ACCOUNT}:{self.key}", "node", PROGRAM, "--location", folder,
            "--blobHost", "127.0.0.1", "--blobPort", "0", "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip
        running = ServerProgram(argv, folder / "log")
        running.wait_until(lambda: self._hear(folder / "log"))
        return running

    def _hear(self, log: Path) -> None:
        """Take the port from what it says."""
        port = re.search(r"http://127\.0\.0\.1:(\d+)\s", log.read_text())[1]
        self.host = f"127.0.0.1:{port}"
        with self.service() as service:
            list(service.list_containers())

    def connection_string(self, *, host: str | None = None, key: str | None = None, sas: str = "") -> str:
        """What names this server, or a proxy before it, and has a key, or a token instead of one."""
        secret = f"SharedAccessSignature={sas}" if sas else f"AccountKey={key or self.key}"
        endpoint = f"http://{host or self.host}/{ACCOUNT}"
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};{secret};BlobEndpoint={endpoint};"

    def options(self, **others: str) -> dict:
        """Storage options."""
        return {"connection_string": self.connection_string(**others)}

    def token(self, **permissions: bool) -> str:
        """A token (SAS) with some permissions, as `read=True`."""
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        until = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
        types, permission = ResourceTypes(container=True, object=True), AccountSasPermissions(**permissions)
        return generate_account_sas(ACCOUNT, self.key, types, permission, until)

    def service(self):
        """The SDK's own client."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.connection_string())

    def stop(self) -> None:
        """End it."""
        self._program.stop()
