"""Whose request it is: a header of it says the salt of its prefixes. Knows no model and no cache."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from starlette.responses import JSONResponse

HEADER = "x-cache-salt"
tenant: ContextVar[str] = ContextVar(
    "kv_hf_tenant", default=""
)  # "" for requests without the header


class Tenants:
    """ASGI middleware: each request runs with the salt of its header as `tenant`.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass one request on."""
        salts = [value for name, value in scope.get("headers", ()) if name == HEADER.encode()]
        if len(salts) > 1:  # a proxy that adds its own must not lose to one that the client sent
            words = {"message": f"{HEADER} must be given once, got {len(salts)} of it"}
            await JSONResponse({"error": words}, status_code=400)(scope, receive, send)
            return
        before = tenant.set(b"".join(salts).decode("latin-1"))
        try:
            await self.app(scope, receive, send)
        finally:
            tenant.reset(before)
