"""TLS as a filter: handshake, traffic in any pieces, farewell, and peers that speak something else."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway import reloads
from gateway.errors import ConfigurationError
from gateway.transport.certificates import server_context
from gateway.transport.stream import Stream, WriteSet
from gateway.transport.tls import RECORDS_MAX, TlsFilter
from tests.interop.servers import program
from tests.transport.ends import FakeSocket, Speaker, Watch

Files = tuple[Path, Path]


def self_signed(folder: Path, name: str = "localhost") -> Files:
    """A certificate and its key, made with the openssl program."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return self_signed(tmp_path_factory.mktemp("tls"))


def pair(files: Files, *, trusted: bool = True) -> tuple[TlsFilter, TlsFilter]:
    """A client and a server."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*files)
    client = ssl.create_default_context(cafile=files[0] if trusted else None)
    return (
        TlsFilter(client, server_side=False, server_hostname="localhost"),
        TlsFilter(server, server_side=True),
    )


def talk(client: TlsFilter, server: TlsFilter, piece: int = 1 << 20) -> tuple[bytes, bytes]:
    """Carry bytes to and fro, `piece` at a time, until neither has any; what client and server heard."""
    heard = {id(client): b"", id(server): b""}
    moved = True
    while moved:
        moved = False
        for one, other in ((client, server), (server, client)):
            data = one.send(b"")
            for at in range(0, len(data), piece):
                moved = True
                heard[id(other)] += other.receive(data[at : at + piece])
    return heard[id(client)], heard[id(server)]


def test_what_is_said_before_the_handshake_ends_arrives_behind_it(files: Files) -> None:
    client, server = pair(files)
    hello = client.send(b"early")
    assert server.receive(hello) == b""
    assert talk(client, server) == (b"", b"early")
    assert client.established
    assert server.established


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(piece=st.integers(1, 300), bodies=st.lists(st.binary(min_size=1, max_size=40_000), max_size=3))
def test_how_the_stream_is_split_changes_nothing(files: Files, piece: int, bodies: list[bytes]) -> None:
    client, server = pair(files)
    talk(client, server, piece)
    for body in bodies:
        data = client.send(body)
        heard = b"".join(server.receive(data[at : at + piece]) for at in range(0, len(data), piece))
        assert heard == body


def test_of_a_flood_of_records_a_turn_takes_only_some_and_none_is_lost(files: Files) -> None:
    client, server = pair(files)
    talk(client, server)
    heard = [server.receive(b"".join(client.send(b"x") for _ in range(2_000)))]
    while server.unread:
        heard.append(server.receive(b""))
    assert b"".join(heard) == b"x" * 2_000
    assert max(map(len, heard)) == RECORDS_MAX


def test_a_listener_does_not_renegotiate(files: Files) -> None:
    assert server_context("mqtts", *files)().options & ssl.OP_NO_RENEGOTIATION


def test_the_farewell_is_understood_and_nothing_follows_it(files: Files) -> None:
    client, server = pair(files)
    talk(client, server)
    last = server.send(b"last words") + server.finish()
    assert client.receive(last) == b"last words"
    assert client.receive(b"") == b""


@pytest.mark.parametrize(
    "data", [b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03"]
)
def test_a_peer_that_speaks_no_tls(files: Files, data: bytes) -> None:
    _, server = pair(files)
    if data == b"\x16\x03":
        assert server.receive(data) == b""
        data = b"\x01\xff\xff\xff"
    assert server.receive(data) == b""
    assert server.ended is not None
    assert server.ended.violation == "tls"
    server.send(b"never")
    server.send(b"")
    server.finish()


def test_a_certificate_that_is_not_trusted_ends_both_sides(files: Files) -> None:
    client, server = pair(files, trusted=False)
    answer = server.receive(client.send(b"")) or server.send(b"")
    client.receive(answer)
    server.receive(client.send(b""))
    for side, why in ((client, "certificate verify failed"), (server, "alert unknown ca")):
        assert side.ended is not None
        assert why in side.ended.text.lower()


def test_what_came_before_a_bad_record_is_heard(files: Files) -> None:
    client, server = pair(files)
    talk(client, server)
    assert server.receive(client.send(b"good") + b"\x17\x03\x03\x00\x10" + bytes(16)) == b"good"
    assert server.ended is not None


def streamed(files: Files, *reads: bytes) -> tuple[Stream, FakeSocket, Speaker, WriteSet]:
    writes, peer = WriteSet(), Speaker()
    sock = FakeSocket(reads=reads)
    stream = Stream(sock, "peer", Watch(), writes, pair(files)[1])
    stream.owner = peer
    return stream, sock, peer, writes


def test_a_stream_answers_garbage_with_an_alert_and_ends(files: Files) -> None:
    stream, sock, peer, writes = streamed(files, b"GET / HTTP/1.1\r\n\r\n")
    stream.read(1.0)
    writes.flush()
    assert len(peer.reasons) == 1
    assert sock.ended
    assert peer.heard == b""


def test_a_stream_that_ends_before_its_handshake_says_nothing_in_clear(files: Files) -> None:
    stream, sock, peer, writes = streamed(files)
    peer.out = b"secret"
    stream.end("the handshake timed out")
    writes.flush()
    assert b"secret" not in sock.written
    assert sock.ended


@pytest.fixture
def renewed(tmp_path: Path) -> Callable[[], Files]:
    return lambda: self_signed(tmp_path)


def test_a_renewed_certificate_is_read_again_and_a_broken_one_is_not(renewed: Callable[[], Files]) -> None:
    certificate, key = renewed()
    latest = server_context("mqtts", certificate, key)
    first = latest()
    assert latest() is first
    renewed()
    os.utime(certificate, ns=(1, 1))
    second = latest()
    assert second is not first
    certificate.write_text("nonsense")
    with capture_logs() as lines:
        assert latest() is second
    assert [line["log_level"] for line in lines] == ["error"]
    refused = reloads.counted["refused"]
    certificate.write_text("")
    with capture_logs() as lines:
        assert latest() is second
        assert latest() is second
    assert reloads.counted["refused"] == refused + 1
    assert len(lines) == 1, "each change is reported once"
    certificate.unlink()
    with capture_logs():
        assert latest() is second


def test_authorities_that_are_cut_short_leave_the_old_ones(files: Files, tmp_path: Path) -> None:
    authorities = tmp_path / "ca.pem"
    whole = files[0].read_text()
    authorities.write_text(whole)
    latest = server_context("mqtts", *files, authorities)
    first = latest()
    for left in ("", whole[: len(whole) // 2]):
        authorities.write_text(left)
        with capture_logs() as lines:
            assert latest() is first
        assert [line["log_level"] for line in lines] == ["error"]
    authorities.write_text(whole)
    with capture_logs():
        assert latest() is not first


def test_files_that_cannot_be_used_at_the_start_are_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="listeners.mqtts.tls: the files cannot be used"):
        server_context("mqtts", tmp_path / "none.pem", tmp_path / "none.key")
