"""Which compiled code runs where."""

import pytest

from pannier.audit.device import chosen_code

SBSA = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("capability", "archs", "chosen"),
    [
        ("8.9", SBSA, "sm_86"),
        ("8.6", SBSA, "sm_86"),
        ("9.0", ("sm_80", "sm_90a", "sm_90"), "sm_90a"),
        ("9.0", ("sm_80", "sm_100a"), "none: this torch can't use it"),
        ("10.3", ("sm_100a", "sm_100"), "sm_100"),
        ("7.5", SBSA, "none: this torch can't use it"),
        ("7.5", ("sm_75", "sm_90"), "sm_75"),
        ("12.1", ("sm_90", "compute_90"), "compute_90, compiled at start"),
    ],
)
def test_code_of_the_own_generation_runs_and_older_intermediate_code(
    capability: str, archs: tuple[str, ...], chosen: str
) -> None:
    """An L4 (8.9) runs sm_86, so looking for its own number would be wrong; a T4G finds nothing in PyPI's wheels."""
    assert chosen_code(capability, archs) == chosen
