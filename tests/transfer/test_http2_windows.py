"""The windows of a connection, without one."""

import random

import pytest
from hyperframe.frame import SettingsFrame

from disagg.transfer import http2_windows
from disagg.transfer.http2_frames import DEFAULT_FRAME, DEFAULT_WINDOW, WIDEST
from disagg.transfer.http2_windows import Room, Taken


def test_no_window_of_a_peer_closes_or_grows_beyond_the_widest(monkeypatch):
    """Many calls of odd lengths on one connection, and one long call."""
    monkeypatch.setattr(http2_windows, "REOPEN_BYTES", 1000)
    source, taken = random.Random(7), Taken()
    windows = {0: WIDEST}
    for stream in (*range(1, 201, 2), *[201] * 99):
        windows.setdefault(stream, WIDEST)
        for _ in range(source.randrange(9)):
            nbytes = source.randrange(700)
            windows[0] -= nbytes
            windows[stream] -= nbytes
            for frame in taken.count(stream, nbytes):
                windows[frame.stream_id] += frame.window_increment
            assert all(WIDEST - 1000 <= window <= WIDEST for window in windows.values())


def test_a_window_that_was_taken_back_lets_nothing_out_until_it_is_open_again():
    room = Room()
    room.begin(1)
    assert room.take(9000) == 9000
    room.apply({SettingsFrame.INITIAL_WINDOW_SIZE: 100})
    assert room.take(5) == 0
    assert room.take(0) == 0
    room.widen(1, 9000)
    assert room.take(500) == 100
    room.begin(3)
    assert room.take(500) == 100


def test_a_window_of_another_stream_is_not_ours():
    room = Room()
    room.begin(3)
    room.widen(1, 1 << 20)
    room.widen(0, 1 << 20)
    sent = [room.take(1 << 20) for _ in range(5)]
    assert sent == [DEFAULT_FRAME] * 3 + [DEFAULT_WINDOW - 3 * DEFAULT_FRAME, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {SettingsFrame.INITIAL_WINDOW_SIZE: WIDEST + 1},
        {SettingsFrame.MAX_FRAME_SIZE: 1 << 24},
        {SettingsFrame.MAX_FRAME_SIZE: DEFAULT_FRAME - 1},
    ],
)
def test_settings_that_no_peer_may_wish_are_refused(settings):
    with pytest.raises(ConnectionError):
        Room().apply(settings)
