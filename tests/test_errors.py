import pickle

import pytest

from disagg import errors
from disagg.errors import DisaggError, UnknownNameError, all_errors, error_from

GRPC_STATUSES = {
    "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED",
    "FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "NOT_FOUND",
}  # fmt: skip


@pytest.mark.parametrize(
    "error", all_errors().values(), ids=lambda error: error.__name__
)
def test_every_error_knows_how_it_looks_from_outside(error):
    assert error.grpc_status in GRPC_STATUSES
    assert 400 <= error.http_status < 600
    assert 1 <= error.exit_code < 256
    assert error.__name__ in (errors.__doc__ or ""), "the drawn tree has every error"


def test_every_error_has_a_reason_of_its_own():
    classes, stack = set(), [DisaggError]
    while stack:
        classes.add(stack[-1])
        stack.extend(stack.pop().__subclasses__())

    assert {error.reason for error in classes} == set(all_errors())
    assert len(classes) == len(all_errors())


def test_an_error_named_by_a_peer_becomes_an_exception_again():
    assert type(error_from("capacity", "full")) is errors.CapacityError
    assert type(error_from("from the future", "x")) is DisaggError
    assert type(error_from("unknown_name", "unknown codec 'x'")) is UnknownNameError


def test_an_unknown_name_lists_the_known_ones():
    unknown = UnknownNameError.of("codec", "x", ["raw", "kivi"])

    assert str(unknown) == "unknown codec 'x'; known: kivi, raw"

    sent = pickle.loads(
        pickle.dumps(unknown)
    )  # from one process of a benchmark to another

    assert (type(sent), str(sent)) == (UnknownNameError, str(unknown))
