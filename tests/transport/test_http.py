"""The head of a request: read when it is whole, within its limit, and refused with a status that says why."""

from __future__ import annotations

import pytest

from gateway.transport.http import HEAD_BYTES_MAX, Refusal, Request, parse_request, response

GET = b"GET /a/b?c=d HTTP/1.1\r\nHost: h\r\nX-One: 1\r\nx-one:  2, 3 \r\n\r\n"


def test_a_request_is_read_when_its_head_is_whole() -> None:
    expected = Request("GET", "/a/b", "1.1", {"host": "h", "x-one": "1, 2, 3"}, b"")
    for size in range(1, len(GET)):
        assert parse_request(GET[:size]) is None
    assert parse_request(GET) == expected
    assert parse_request(GET + b"rest") == expected._replace(rest=b"rest")
    assert expected.tokens("x-one") == ["1", "2", "3"]
    assert expected.tokens("absent") == []


def test_the_head_has_a_limit_however_it_comes() -> None:
    fill = HEAD_BYTES_MAX - len(b"GET / HTTP/1.1\r\nHost: h\r\nX: \r\n\r\n")
    fits = b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * fill + b"\r\n\r\n"
    assert len(fits) == HEAD_BYTES_MAX
    assert parse_request(fits) is not None
    longer = fits.replace(b"X: ", b"X: xx")
    assert parse_request(longer[:HEAD_BYTES_MAX]) is None
    for data in (longer[: HEAD_BYTES_MAX + 1], longer, longer + b"rest"):
        with pytest.raises(Refusal) as refusal:
            parse_request(data)
        assert refusal.value.status == 431


@pytest.mark.parametrize(
    "data",
    [
        b"\x10\x0c",
        b"get / HTTP/1.1\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost h\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_bad_request(data: bytes) -> None:
    with pytest.raises(Refusal) as refusal:
        parse_request(data)
    assert refusal.value.status == 400
    assert refusal.value.response.startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_response_says_its_length_and_that_it_is_the_last() -> None:
    head, _, body = response(200, "alive\n").partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
    assert {b"Content-Length: 6", b"Connection: close"} <= set(head.splitlines())
    assert body == b"alive\n"
    assert response(200, "alive\n", with_body=False) == head + b"\r\n\r\n"
