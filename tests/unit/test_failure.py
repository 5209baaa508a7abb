"""Whose fault a failure is."""

import errno

import pytest

from dstune.errors import MachineError, ModelError, UnsupportedOperationError
from dstune.estimator.failure import failure_from


def caught(error: BaseException) -> BaseException:
    """An exception with a traceback, raised in this file."""
    try:
        raise error
    except type(error) as seen:
        return seen


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), MachineError.code),
        (MemoryError(), MachineError.code),
        (OSError(errno.ENOENT, "no such file"), ModelError.code),
        (ValueError("wrong shape"), ModelError.code),
        (UnsupportedOperationError("an operation"), UnsupportedOperationError.code),
    ],
)
def test_the_code_says_whose_fault_it_is(error: BaseException, code: str) -> None:
    failure = failure_from(caught(error))
    assert failure.code == code
    assert failure.traceback


def test_the_users_own_frames_are_shown() -> None:
    failure = failure_from(caught(ValueError("wrong shape")))
    assert failure.because[0] == "ValueError: wrong shape"
    assert any("test_failure.py" in line for line in failure.because)
