"""`each_case` runs all cases and names those that failed."""

from __future__ import annotations

import pytest

from tests.each_case import each_case

ran: list[int] = []


def check_numbers() -> None:
    with each_case() as case:
        for number in range(4):
            with case(f"number {number}"):
                ran.append(number)
                assert number % 2 == 0


def fail_outside() -> None:
    with each_case() as case:
        with case("a case"):
            raise AssertionError
        raise ValueError("outside")


def test_failures_name_their_cases_and_later_cases_run() -> None:
    ran.clear()
    with pytest.raises(ExceptionGroup) as caught:
        check_numbers()
    assert ran == [0, 1, 2, 3]
    assert [failure.__notes__ for failure in caught.value.exceptions] == [["case: number 1"], ["case: number 3"]]
    assert all(isinstance(failure, AssertionError) for failure in caught.value.exceptions)


def test_cases_that_pass_raise_nothing() -> None:
    with each_case() as case, case("a case"):
        pass


def test_a_failure_outside_of_a_case_ends_the_test_at_once() -> None:
    with pytest.raises(ValueError, match="outside"):
        fail_outside()
