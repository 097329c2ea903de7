"""An attention worker as a process."""

from pathlib import Path

import pytest

from pannier.attention.service import run
from pannier.runtime.config import AttentionConfig

pytestmark = pytest.mark.timeout(30)


def test_memory_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process ends with it, and leaves no socket file."""
    config = AttentionConfig(memory=1 << 60, listen=f"ipc://{tmp_path}/links", gateway=f"ipc://{tmp_path}/gateway")
    assert run(config) == 1
    assert "less than the 1099511627776 MiB wanted for KV blocks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
