"""Whose request it is: a header of it says the salt of its prefixes, others that a foreign web page sent it. Knows no cache."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

HEADER = "x-cache-salt"
STATS_ROUTE = "/kv_hf/stats"
OF_THE_OPERATOR = {"/reset", "/load_model", STATS_ROUTE}
tenant: ContextVar[str] = ContextVar(
    "kv_hf_tenant", default=""
)  # "" for requests without the header


class Tenants:
    """ASGI middleware: each request runs with the salt of its header as `tenant`; web pages get no route of the operator.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass one request on."""
        headers = Headers(raw=list(scope.get("headers", ())))
        salts, path = headers.getlist(HEADER), scope.get("path")
        refused = None
        if len(salts) > 1:  # a proxy that adds its own must not lose to one that the client sent
            refused = 400, f"{HEADER} must be given once, got {len(salts)} of it"
        elif path in OF_THE_OPERATOR and _is_foreign(headers, scope.get("server") or ("",)):
            refused = 403, f"{path} is not for web pages: Host or Origin names another machine"
        if refused is not None:
            status, words = refused
            answer = JSONResponse({"error": {"message": words}}, status_code=status)
            await answer(scope, receive, send)
            return
        before = tenant.set("".join(salts))
        try:
            await self.app(scope, receive, send)
        finally:
            tenant.reset(before)


def _is_foreign(headers: Headers, server: Any) -> bool:
    """Say whether Origin is another site's, or Host a name that somebody made lead to this machine's loopback address."""
    host, origin = headers.get("host", ""), headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != host
    return foreign or (_is_loopback(server[0]) and not _is_loopback(host))


def _is_loopback(host: str) -> bool:
    """Say whether a host, with or without a port, is this machine to itself."""
    try:
        name = urlsplit(f"//{host}").hostname or host
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
