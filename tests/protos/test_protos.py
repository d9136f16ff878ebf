"""The interface files: committed stubs are those of today's .proto, and the style is buf's."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "protos" / "disagg" / "v1"
PROTOS = sorted(FOLDER.glob("*.proto"))


def describe(path: Path, out: Path) -> FileDescriptorProto:
    """The descriptor of a .proto file, with its comments."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    target = out / "descriptor"
    arguments = [
        "protoc",
        f"-Idisagg/protos={ROOT / 'protos' / 'disagg'}",
        "--include_source_info",
        f"--descriptor_set_out={target}",
        f"disagg/protos/v1/{path.name}",
    ]
    assert protoc.main(arguments) == 0
    return FileDescriptorSet.FromString(target.read_bytes()).file[0]


def test_the_committed_stubs_are_what_the_generator_writes(tmp_path, monkeypatch):
    pytest.importorskip("grpc_tools")
    monkeypatch.syspath_prepend(str(ROOT / "protos"))
    from generate import generate

    generate(tmp_path)
    written = sorted((tmp_path / "disagg" / "protos" / "v1").iterdir())
    assert len(written) == 2 * len(PROTOS)
    for path in written:
        assert (FOLDER / path.name).read_text() == path.read_text(), (
            f"{path.name} is stale"
        )


all_files = pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)


@all_files
def test_names_follow_the_standard_of_buf(path, tmp_path):
    file = describe(path, tmp_path)

    folder = path.relative_to(ROOT / "protos").parent
    assert file.package == ".".join(folder.parts)
    assert re.fullmatch(r"[a-z_]+", path.stem)
    for enum in file.enum_type:
        prefix = re.sub(r"(?<!^)([A-Z])", r"_\1", enum.name).upper() + "_"
        assert enum.value[0].name == prefix + "UNSPECIFIED"
        for value in enum.value:
            assert value.name.startswith(prefix)
    for message in file.message_type:
        for field in message.field:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", field.name)


@all_files
def test_every_method_has_messages_of_its_own(path, tmp_path):
    file = describe(path, tmp_path)

    types: list[str] = []
    for service in file.service:
        assert service.name.endswith("Service")
        for method in service.method:
            types += [method.input_type, method.output_type]
            check_type(service.name, method.name, method.input_type, "Request")
            check_type(service.name, method.name, method.output_type, "Response")
    assert len(types) == len(set(types))


def check_type(service: str, method: str, type_name: str, kind: str) -> None:
    short_name = type_name.rsplit(".", 1)[1]
    assert short_name in (method + kind, service + method + kind)


@all_files
def test_everything_has_a_comment(path, tmp_path):
    file = describe(path, tmp_path)

    locations = file.source_code_info.location
    commented = {tuple(place.path) for place in locations if place.leading_comments}
    places = [*message_places(file), *enum_places(file), *service_places(file)]
    assert [place for place in places if place not in commented] == []


Place = tuple[int, ...]  # a path of field numbers in descriptor.proto


def message_places(file: FileDescriptorProto) -> Iterator[Place]:
    for i, message in enumerate(file.message_type):
        yield (4, i)
        for j in range(len(message.field)):
            yield (4, i, 2, j)
        # an optional field has a oneof whose name begins with "_"
        declared = [x for x in message.oneof_decl if not x.name.startswith("_")]
        for j in range(len(declared)):
            yield (4, i, 8, j)


def enum_places(file: FileDescriptorProto) -> Iterator[Place]:
    for i, enum in enumerate(file.enum_type):
        yield (5, i)
        for j in range(len(enum.value)):
            yield (5, i, 2, j)


def service_places(file: FileDescriptorProto) -> Iterator[Place]:
    for i, service in enumerate(file.service):
        yield (6, i)
        for j in range(len(service.method)):
            yield (6, i, 2, j)
