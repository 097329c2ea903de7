"""Other people's programs for a measurement, in environments of their own.

What they bring must not be in `.venv`: transformers imports scikit-learn and pandas wherever it finds them, and pytest
loads every plugin.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python_with(name: str, *requirements: str, ours: Collection[str] = ()) -> Path:
    """The interpreter of an environment that holds these; made the first time, which needs a package index.

    If packages of `.venv` are named as `ours` it finds all that is there, and uses these in the same version.
    """
    folder = ROOT / ".venv" / "own" / name
    python, stamp = folder / "bin" / "python", folder / "requirements"
    kept = [f"{each}=={version(each)}" for each in ours]
    wanted = "\n".join((sys.version, *requirements, *kept))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Installing {', '.join(requirements)} into {folder.relative_to(ROOT)}; a few minutes.", file=sys.stderr)
    venv.create(folder, clear=True, symlinks=True)
    if ours:
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        (Path(packages) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements, *kept], check=True, stdout=sys.stderr)
    stamp.write_text(wanted)
    return python


def without_network() -> dict[str, str]:
    """Variables of a program that shall ask nobody but the server under test."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return {**os.environ, **offline, "OPENAI_API_KEY": "none"}
