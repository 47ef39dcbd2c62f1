"""Where the repository, its tests and its scripts lie."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SCRIPTS = ROOT / "scripts"
