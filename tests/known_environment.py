"""One environment for every test and its child processes, whatever the shell held that started pytest.

conftest.py imports this file before torch, transformers and huggingface_hub, because they read variables when they are imported.
A test that is about a variable sets it with monkeypatch. scripts/environments.py starts pytest with each variable set.
"""

import os
import shutil
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path

# beginnings of names
CLEARED = """
ACCELERATE_ ALL_PROXY all_proxy CUDA_ FORCE_COLOR GIT_ HF_ HTTP http HUGGINGFACE_ JUPYTER_ KMP_ KV_HF_ LANGUAGE LC_ LOCAL_RANK MKL_
MPL NLTK_ NO_COLOR OMP_ PYTHONWARNINGS PYTORCH_ RANK TORCH TQDM_ TRANSFORMERS_ TRITON_ WORLD_SIZE XDG_
"""
# what decides on purpose which code runs (ATEN_CPU_CAPABILITY, too); KV_HF_TEST_GPU=1 lets the tests see a GPU,
# and KV_HF_TEST_HOME is the home that they find
CHOSEN = """
KV_HF_CHROMIUM KV_HF_ISA KV_HF_LIBRARY KV_HF_TEST_GPU KV_HF_TEST_HOME KV_HF_TEST_THREADS OMP_WAIT_POLICY
"""


def _enter() -> Path | None:
    """Set the variables of this process. Return its home folder, or None in a worker, which has its parent's."""
    kept = {name: os.environ[name] for name in CHOSEN.split() if name in os.environ}
    for name in list(os.environ):
        if name.startswith(tuple(CLEARED.split())):
            del os.environ[name]
    made = None
    if "PYTEST_XDIST_WORKER" not in os.environ:
        made = Path(tempfile.mkdtemp(prefix="kv_hf-home-"))
        os.environ["HOME"] = kept.get("KV_HF_TEST_HOME", str(made))
    cache = Path(__file__).parent.parent / ".pytest_cache"  # of nothing that a test is about
    os.environ.update(
        kept,
        COLUMNS="80",
        GIT_CONFIG_COUNT="1",  # a clone may belong to another user
        GIT_CONFIG_KEY_0="safe.directory",
        GIT_CONFIG_VALUE_0="*",
        LANG="C.UTF-8",
        MPLCONFIGDIR=str(cache / "matplotlib"),
        OMP_NUM_THREADS=kept.get("KV_HF_TEST_THREADS", "1"),
        TRITON_CACHE_DIR=str(cache / "triton"),
        TZ="UTC",
    )
    if "KV_HF_TEST_GPU" not in kept:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    time.tzset()
    return made


def leave() -> None:
    """Remove the home folder where it was made by this process."""
    if _home is not None:
        shutil.rmtree(_home, ignore_errors=True)


def forget_warnings() -> None:
    """Warn as Python does by itself; pytest brings back what PYTHONWARNINGS said when it has imported a conftest.py."""
    sys.warnoptions.clear()
    if _warned:
        warnings.resetwarnings()


def _addresses_without_network(host, *rest, **options):
    """Refuse at once what a name server would be asked for: a network changes no outcome."""
    if host in (None, "", "localhost") or str(host).startswith(("127.", "0.0.0.0", "::")):
        return _addresses(host, *rest, **options)
    raise socket.gaierror(socket.EAI_AGAIN, f"tests have no network, and asked for {host}")


_home, _warned = _enter(), bool(sys.warnoptions)
_addresses, socket.getaddrinfo = socket.getaddrinfo, _addresses_without_network
forget_warnings()
