"""Serve one page to this machine's browser."""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"


def make_server(page: str, port: int) -> ThreadingHTTPServer:
    """Return a server of `page` at HOST, not yet running; port 0 takes any free one.

    Raises: OSError where the port is taken, OverflowError for a number that is no port.
    """
    body = page.encode()

    class Handler(BaseHTTPRequestHandler):
        server_version = "kv_hf"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            if self.path.split("?")[0] not in ("/", "/index.html"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Keep the terminal quiet."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    return server


def serve(server: ThreadingHTTPServer) -> None:
    """Serve until Ctrl-C, then give the port back."""
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
