"""A client as anybody would make it: stubs written by protoc, frames by wire.py."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType

import grpc
import pytest

from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.wire import Ticket, pack
from tests.transfer.prompts import MODEL, Prompt

PROTOS = Path(__file__).resolve().parents[2] / "protos" / "disagg"


def generate_stubs(folder: Path) -> ModuleType:
    """The module that the gRPC plugin of protoc writes; skips where that is not installed."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    flags = [f"-Idisagg/protos={PROTOS}", f"--grpc_python_out={folder}"]
    assert protoc.main(["protoc", *flags, "disagg/protos/v1/kv_transfer.proto"]) == 0
    (path,) = folder.rglob("*_pb2_grpc.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def push_one(stubs: ModuleType, address: str, prompt: Prompt, nonce: int, epoch: int) -> None:
    """Hand over one prompt that is reserved, a frame at a time; returns when it is acknowledged."""
    ours, answered = Ticket(nonce, epoch, 1), SimpleQueue[kv.PushResponse]()

    def frames() -> Iterator[kv.PushRequest]:
        for frame in prompt.frames(ours):
            yield kv.PushRequest(frame=b"".join(pack(frame)))
            assert not answered.get(timeout=20.0).HasField("error")

    with grpc.insecure_channel(address) as channel:
        stub = stubs.KvTransferServiceStub(channel)
        terms = {"model": MODEL, "plan": prompt.plan.fingerprint, "tokens": prompt.tokens}
        attached = stub.Attach(kv.AttachRequest(ticket=kv.Ticket(**vars(ours)), **terms))
        assert not attached.admitted
        for credit in stub.Push(frames()):
            answered.put(credit)
        commit = b"".join(pack(prompt.commit(ours)))
        stub.Commit(kv.CommitRequest(frame=commit))
