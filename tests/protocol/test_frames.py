"""Tests that frames survive any division of the stream, and that other bytes are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparklog.errors import ErrorCode, ProtocolError
from sparklog.protocol.connection import ClientEnd, PreparedRequest
from sparklog.protocol.frames import FrameDecoder, encode_frame
from sparklog.protocol.messages import Produce, ProducePartition, decode_request
from sparklog.protocol.received import Frame, OversizeFrame

LIMIT = 4 * 1024 * 1024


def received(decoder: FrameDecoder, stream: bytes, steps: list[int] | None = None) -> Iterator[int]:
    """Put the stream into the decoder's buffer, at most ``steps`` bytes at a time in turn. Yield the number of
    buffered bytes."""
    at, turn = 0, 0
    while at < len(stream):
        room = decoder.get_buffer()
        assert len(room) > 0
        count = min(len(room), len(stream) - at, steps[turn % len(steps)] if steps else len(stream))
        room[:count] = stream[at : at + count]
        yield count
        at, turn = at + count, turn + 1


def feed(decoder: FrameDecoder, stream: bytes, steps: list[int] | None = None) -> list[Frame | OversizeFrame]:
    """Push the stream through the decoder, at most ``steps`` bytes at a time in turn."""
    return [frame for count in received(decoder, stream, steps) for frame in decoder.buffer_updated(count)]


def joined(header: bytes, body: bytes) -> bytes:
    return b"".join(encode_frame(header, [body] if body else []))


@given(
    st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=300)), max_size=20),
    st.lists(st.integers(1, 400), min_size=1, max_size=8),
)
def test_frames_are_decoded_as_they_were_encoded(messages: list[tuple[bytes, bytes]], steps: list[int]) -> None:
    stream = b"".join(joined(header, body) for header, body in messages)
    frames = feed(FrameDecoder(LIMIT), stream, steps)
    assert [(bytes(f.header), bytes(f.body)) for f in frames if isinstance(f, Frame)] == messages


@pytest.mark.parametrize("size", [131_000, 131_072, 262_144, 300_000, 3_000_000])
@pytest.mark.parametrize("step", [1 << 16, 100_003, 1 << 22])
def test_large_frames_between_small_ones_are_decoded(size: int, step: int) -> None:
    body = bytes(range(256)) * (size // 256)
    stream = (
        joined(b"a", b"x") + joined(b"large", body) + joined(b"b", b"") + joined(b"large", body) + joined(b"c", b"")
    )
    frames = feed(FrameDecoder(LIMIT), stream, [step])
    assert [bytes(f.header) for f in frames] == [b"a", b"large", b"b", b"large", b"c"]
    bodies = [f.body for f in frames if isinstance(f, Frame)]
    assert bytes(bodies[1]) == body
    assert bytes(bodies[3]) == body


def test_a_single_frame_is_decoded_as_usual() -> None:
    """The frames are the same whether ``decode_single`` or ``buffer_updated`` returns them."""
    taken = 0

    @given(
        st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=30)), max_size=20),
        st.one_of(st.just([]), st.lists(st.integers(1, 90), min_size=1, max_size=8)),
        st.sampled_from([40, LIMIT]),
    )
    # The rest of a frame over the limit has the form of a frame. The next read has the size of a frame already begun.
    @example([(b"", bytes(40) + joined(b"h", b""))], [48, 9], 40)
    @example([(b"h" * 12, b""), (b"i" * 12, b"")], [10, 20], LIMIT)
    @example([(b"", bytes(40)), (b"", b"")], [], 40)
    def same(messages: list[tuple[bytes, bytes]], steps: list[int], limit: int) -> None:
        nonlocal taken
        frames = [joined(header, body) for header, body in messages]
        stream = b"".join(frames)
        steps = steps or [len(frame) for frame in frames] or [1]  # each frame by itself, as in most reads
        expected = feed(FrameDecoder(limit), stream, steps)
        decoder = FrameDecoder(limit)
        found: list[Frame | OversizeFrame] = []
        for count in received(decoder, stream, steps):
            frame = decoder.decode_single(count)
            if frame is None:
                found += decoder.buffer_updated(count)
                continue
            taken += 1
            found.append(frame if len(frame.body) else Frame(memoryview(bytes(frame.header)), frame.body))
        # compared in the end: each frame has memory of its own, except for a header without a body
        assert list(map(as_tuple, found)) == list(map(as_tuple, expected))

    same()
    assert taken > 50, taken


@pytest.mark.parametrize("body", [b"", b"b" * 100])
def test_most_single_frames_take_the_fast_path(body: bytes) -> None:
    decoder = FrameDecoder(LIMIT)
    for length in (0, 1, 1000):
        frame = joined(b"h" * length, body)
        decoder.get_buffer()[: len(frame)] = frame
        single = decoder.decode_single(len(frame))
        assert single is not None and as_tuple(single) == (b"h" * length, body)


def test_no_frame_takes_the_fast_path_after_a_malformed_one() -> None:
    decoder = FrameDecoder(LIMIT)
    decoder.get_buffer()[:8] = bytes(8)
    assert decoder.decode_single(8) is None
    with pytest.raises(ProtocolError):
        decoder.buffer_updated(8)
    frame = joined(b"h", b"")
    decoder.get_buffer()[: len(frame)] = frame
    assert decoder.decode_single(len(frame)) is None


def as_tuple(frame: Frame | OversizeFrame) -> object:
    return (bytes(frame.header), bytes(frame.body)) if isinstance(frame, Frame) else frame


@given(
    acks=st.sampled_from([1, -1]),
    topic=st.text(max_size=30),
    body=st.tuples(st.binary(min_size=96, max_size=96), st.binary(max_size=500)),
    before=st.integers(0, 300),
)
def test_a_prepared_request_equals_the_usual_one(acks: int, topic: str, body: tuple[bytes, bytes], before: int) -> None:
    """The same connection sends both at the same place."""
    first, second = body
    request = Produce(0, acks, 30_000, (ProducePartition(topic, 7, "id", 1, len(second)),))
    plain, preparing = ClientEnd(LIMIT), ClientEnd(LIMIT)
    prepared = PreparedRequest(request, len(first) + len(second))
    for _ in range(before):
        plain.encode(request)
        preparing.encode(request)
    for _ in range(3):
        cid, buffers = plain.encode(request, [first, second])
        prepared_cid, frame = preparing.encode_prepared(prepared, first, second)
        assert prepared_cid == cid
        found, expected = feed(FrameDecoder(LIMIT), frame), feed(FrameDecoder(LIMIT), b"".join(buffers))
        assert isinstance(found[0], Frame) and isinstance(expected[0], Frame) and len(found) == 1
        assert decode_request(found[0].header) == decode_request(expected[0].header)
        assert decode_request(found[0].header).cid == cid
        assert bytes(found[0].body) == bytes(expected[0].body) == first + second
        assert (len(frame) - len(first) - len(second)) % 8 == 0, "the body must start at the same place"


def test_bodies_start_at_multiples_of_eight_bytes() -> None:
    for length in range(17):
        frame = b"".join(encode_frame(b"h" * length, [b"body"]))
        assert frame.index(b"body") % 8 == 0


def test_large_body_parts_are_passed_through_without_a_copy() -> None:
    part = bytes(1 << 20)
    assert encode_frame(b"h", [part])[1] is part


def test_an_oversized_frame_is_skipped_and_the_next_read() -> None:
    stream = joined(b"big", bytes(5_000_000)) + joined(b"next", b"1")
    big, following = feed(FrameDecoder(LIMIT), stream, [70_001])
    assert big == OversizeFrame(b"big", 5_000_016, LIMIT)
    assert isinstance(following, Frame)
    assert bytes(following.header) == b"next"


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", bytes(16), b"\x10\0\0\0\xff\xff\xff\xff"])
def test_bytes_that_are_not_a_frame_are_refused(junk: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        feed(FrameDecoder(LIMIT), junk)
    assert caught.value.code == ErrorCode.MALFORMED_FRAME
    assert caught.value.fatal
