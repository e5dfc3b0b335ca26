"""Environment of a process that runs a user's code: what programs need, and the variables that its options name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_KEPT = frozenset(
    "PATH LD_LIBRARY_PATH LANG LANGUAGE TZ SSL_CERT_FILE SSL_CERT_DIR CUDA_VISIBLE_DEVICES OMP_NUM_THREADS "
    "MKL_NUM_THREADS OPENBLAS_NUM_THREADS".split()
)


def worker_environment(secrets: Sequence[str], folder: str) -> dict[str, str]:
    """Variables of a worker that lives in ``folder``. It finds the same modules as this process, also those in the
    working directory of this one, which it does not share. Raises KeyError for a secret that is not set."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
    path = dict.fromkeys([os.getcwd(), *map(os.path.abspath, filter(None, sys.path))])
    own = {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join(path)}
    return kept | {name: os.environ[name] for name in secrets} | own


def unset_secrets(secrets: Sequence[str], option: str = "reward.secrets") -> str | None:
    """What to do if variables that ``option`` names are not set here."""
    missing = [name for name in secrets if name not in os.environ]
    if not missing:
        return None
    return f"{option}: expected the environment variable {', '.join(missing)}, found none; set it, or remove it"
