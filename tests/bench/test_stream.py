from disagg.bench.stream import FRAME_BYTES, StreamServer, push_stream


def test_the_socket_brings_every_byte():
    nbytes = FRAME_BYTES + 12345
    server = StreamServer("127.0.0.1", nbytes)
    try:
        data = memoryview(bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
        assert push_stream("127.0.0.1", server.port, data) == nbytes
        assert server._memory == data
        assert push_stream("127.0.0.1", server.port, data[:777]) == 777
    finally:
        server.close()
