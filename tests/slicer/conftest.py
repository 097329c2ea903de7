"""Keeps torch's own trace log out of what pytest captures (it slows an export down), and proofs between tests."""

import logging
from pathlib import Path

import pytest
import torch  # noqa: F401 (sets the logger up, which would undo what follows)

logging.getLogger("torch.__trace").disabled = True


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests that don't look into it: each type is proved once."""
    return tmp_path_factory.mktemp("cache")
