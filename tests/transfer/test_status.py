"""Errors as statuses: what every class becomes, and what nameless failures mean."""

import grpc
import pytest

from disagg.errors import DisaggError, all_errors
from disagg.transfer.status import MESSAGE_KEY, REASON_KEY, error_of


def failure(code: grpc.StatusCode, *trailing: tuple[str, object]) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailing)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details="because")


@pytest.mark.parametrize("error", all_errors().values(), ids=lambda error: error.__name__)
def test_every_error_has_a_status(error):
    assert error.grpc_status in grpc.StatusCode.__members__


def test_a_named_error_comes_back_with_its_type_and_message():
    trailing = ((REASON_KEY, "capacity"), (MESSAGE_KEY, "no rööm".encode()))
    found = error_of(failure(grpc.StatusCode.UNAVAILABLE, *trailing))
    assert (found.reason, str(found)) == ("capacity", "no rööm")


def test_a_reason_of_the_future_is_still_an_error_of_ours():
    assert type(error_of(failure(grpc.StatusCode.ABORTED, (REASON_KEY, "new")))) is DisaggError


@pytest.mark.parametrize("code", grpc.StatusCode, ids=lambda code: code.name)
def test_every_nameless_failure_is_a_typed_error(code):
    found = error_of(failure(code))
    assert isinstance(found, DisaggError)
    assert code.name in str(found)
