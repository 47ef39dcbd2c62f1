"""Serve one page to this machine's browser, and to nobody who only borrows its name."""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
# names of this machine for itself: a page of a stranger whose name resolves to it (DNS rebinding) asks with another one
NAMES = (HOST, "localhost", "[::1]")
_WAIT_S = 20.0  # for a request that was begun
# the page is nobody's frame, script or picture
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def make_server(page: str, port: int) -> ThreadingHTTPServer:
    """Return a server of `page` at HOST, not yet running; port 0 takes any free one.

    Requests are answered only where their Host is a name of this machine with the served port; all others get 421.

    Raises: OSError where the port is taken, OverflowError for a number that is no port.
    """
    body = page.encode()

    class Handler(BaseHTTPRequestHandler):
        server_version = "kv_hf"
        sys_version = ""
        timeout = _WAIT_S

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            port = self.connection.getsockname()[1]
            if not is_own_host(self.headers.get_all("Host", []), port):
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
                return
            if self.path.split("?")[0] not in ("/", "/index.html"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Keep the terminal quiet."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    return server


def is_own_host(hosts: list[str], port: int) -> bool:
    """Say whether the Host headers of a request are one, and a name of this machine with the served port.

    The port may be left out where it is 80, as browsers do.
    """
    if len(hosts) != 1:
        return False
    name, colon, given = hosts[0].strip().lower().rpartition(":")
    if not colon or given.endswith("]"):  # no port
        name, given = hosts[0].strip().lower(), "80"
    return name in NAMES and given == str(port)


def serve(server: ThreadingHTTPServer) -> None:
    """Serve until Ctrl-C, then give the port back."""
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
