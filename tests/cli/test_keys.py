"""`pannier keys`: it shows files and never what is in them."""

from pathlib import Path

from typer.testing import CliRunner

from pannier.cli.__main__ import app


def test_files_are_named_and_no_key_is_shown(tmp_path: Path) -> None:
    """Once made they are kept."""
    folder = tmp_path / "keys"
    made = CliRunner().invoke(app, ["keys", "--out", str(folder), "--client", "alice"])
    assert made.exit_code == 0
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert sorted(map(Path, made.output.split())) == files
    keys = {path: path.read_text().strip() for path in files}
    assert not any(key in made.output for key in keys.values())
    again = CliRunner().invoke(app, ["keys", "--out", str(folder)])
    assert again.output == f"{folder} has all of them already; nothing was changed\n"
    assert {path: path.read_text().strip() for path in files} == keys


def test_help_says_what_goes_where() -> None:
    """And with which mode."""
    text = " ".join(CliRunner().invoke(app, ["keys", "--help"]).output.split())
    for part in ("worker.secret", "clients/NAME.public", "0600"):
        assert part in text
