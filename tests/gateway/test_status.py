"""The status of a stack, beside what other tests ask it for."""

from pannier.gateway.status import in_order


def test_workers_are_listed_by_name_with_numbers_as_numbers() -> None:
    names = ["attention-10", "attention-2", "b", "attention-1", "2nd", "a-1-10", "a-1-9"]
    assert in_order(names) == ["2nd", "a-1-9", "a-1-10", "attention-1", "attention-2", "attention-10", "b"]
