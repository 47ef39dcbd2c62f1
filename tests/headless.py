"""A real Chromium without a window, for the tests of the planner's page."""

import os
import shutil

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """Return the path of a Chromium, or skip the test with the reason. KV_HF_CHROMIUM names one."""
    pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    named = os.environ.get("KV_HF_CHROMIUM")
    if named:
        if not os.access(named, os.X_OK):
            pytest.fail(f"KV_HF_CHROMIUM={named} is no program")
        return named
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            f"no browser: none of {', '.join(NAMES)} is on PATH, and KV_HF_CHROMIUM names none"
        )
    return found
