"""The interface files: committed stubs are those of today's .proto, and the style is buf's."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "protos" / "disagg" / "v1"
PROTOS = sorted(FOLDER.glob("*.proto"))


def describe(path: Path, out: Path) -> FileDescriptorProto:
    protoc = pytest.importorskip("grpc_tools.protoc")
    target = out / "descriptor"
    flags = ["--include_source_info", f"--descriptor_set_out={target}"]
    here = f"-Idisagg/protos={ROOT / 'protos' / 'disagg'}"
    assert protoc.main(["protoc", here, *flags, f"disagg/protos/v1/{path.name}"]) == 0
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


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_names_follow_the_standard_of_buf(path, tmp_path):
    file = describe(path, tmp_path)
    assert file.package == ".".join(path.relative_to(ROOT / "protos").parent.parts)
    assert re.fullmatch(r"[a-z_]+", path.stem)
    for enum in file.enum_type:
        prefix = re.sub(r"(?<!^)([A-Z])", r"_\1", enum.name).upper() + "_"
        assert enum.value[0].name == prefix + "UNSPECIFIED"
        assert all(value.name.startswith(prefix) for value in enum.value)
    for message in file.message_type:
        assert all(
            re.fullmatch(r"[a-z][a-z0-9_]*", field.name) for field in message.field
        )
    used: list[str] = []
    for service in file.service:
        assert service.name.endswith("Service")
        for method in service.method:
            for kind, name in (
                ("Request", method.input_type),
                ("Response", method.output_type),
            ):
                short = name.rsplit(".", 1)[1]
                assert short in (method.name + kind, service.name + method.name + kind)
                used.append(name)
    assert len(used) == len(set(used))


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_everything_has_a_comment(path, tmp_path):
    file = describe(path, tmp_path)
    places = file.source_code_info.location
    commented = {tuple(place.path) for place in places if place.leading_comments}
    expected: list[tuple[int, ...]] = []
    for i, message in enumerate(file.message_type):
        expected += [(4, i), *((4, i, 2, j) for j in range(len(message.field)))]
        declared = [x for x in message.oneof_decl if not x.name.startswith("_")]
        expected += [(4, i, 8, j) for j in range(len(declared))]
    for i, enum in enumerate(file.enum_type):
        expected += [(5, i), *((5, i, 2, j) for j in range(len(enum.value)))]
    for i, service in enumerate(file.service):
        expected += [(6, i), *((6, i, 2, j) for j in range(len(service.method)))]
    assert [place for place in expected if place not in commented] == []
