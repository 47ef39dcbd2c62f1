"""Whose request it is: a header of it says the salt of its prefixes. Knows no model and no cache."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

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
        salt = next(
            (value for name, value in scope.get("headers", ()) if name == HEADER.encode()), b""
        )
        before = tenant.set(salt.decode("latin-1"))
        try:
            await self.app(scope, receive, send)
        finally:
            tenant.reset(before)
