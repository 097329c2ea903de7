"""What an installation from a wheel has."""

import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(msgspec.__file__).parents[1]
pytestmark = pytest.mark.slow

CLIENT_ONLY = f"""
import sys
sys.path[:0] = [sys.argv[1]]
sys.path.append({str(SITE)!r})
import pannier.client
assert pannier.client.__file__.startswith(sys.argv[1])
print(*sorted(name for name in sys.modules if "." not in name and getattr(sys.modules[name], "__file__", None)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (file,) = folder.glob("*.whl")
    return zipfile.Path(file)


def test_three_roots_become_one_namespace(wheel: zipfile.Path) -> None:
    """Every package of the repository is there, and none of the folders that only hold them."""
    there = {path.name for path in (wheel / "pannier").iterdir()}
    packages = {
        path.name
        for root in ("services", "common", "kernels")
        for path in (ROOT / root / "pannier").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert there == packages
    assert {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")} == {"pannier"}


def test_the_embedded_model_is_there(wheel: zipfile.Path) -> None:
    """The first start needs no hub."""
    files = {path.name for path in (wheel / "pannier" / "models" / "embedded").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files


def test_every_package_tells_type_checkers_that_it_is_typed(wheel: zipfile.Path) -> None:
    """A namespace has no py.typed of its own."""
    packages = [path for path in (wheel / "pannier").iterdir() if (path / "__init__.py").exists()]
    assert [path.name for path in packages if not (path / "py.typed").exists()] == []


def test_the_base_install_is_enough_for_the_client(wheel: zipfile.Path, tmp_path: Path) -> None:
    """From the unpacked wheel, with no path of the repository, only two libraries are imported."""
    with zipfile.ZipFile(str(wheel.root.filename)) as archive:
        archive.extractall(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CLIENT_ONLY, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    imported = set(ran.stdout.split()) - sys.stdlib_module_names
    assert imported - {"typing_extensions"} == {"msgspec", "zmq"}  # which zmq takes where it is
