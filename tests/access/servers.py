"""Small servers of others for tests: one that has keys of tokens, one that knows users."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from tests.needs import needed

ISSUER: Final = "https://login.example.com"
AUDIENCE: Final = "gateway"


class Signer:
    """A key with its name, which signs tokens."""

    def __init__(self, kid: str | None = "one", algorithm: str = "RS256") -> None:
        self.kid = kid
        self.algorithm = algorithm

    @cached_property
    def key(self) -> Any:
        """The private key, which is generated when it is first used: tests have signers as constants."""
        if self.algorithm.startswith("ES"):
            return ec.generate_private_key(ec.SECP256R1())
        return rsa.generate_private_key(public_exponent=65_537, key_size=2_048)

    def token(self, user: str | None = "device", *, secs: float | None = 60.0, **claims: Any) -> str:
        """A token that lasts so many seconds."""
        now = time.time()
        stated: dict[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "iat": now - 3600}
        if user is not None:
            stated["sub"] = user
        if secs is not None:
            stated["exp"] = now + secs
        headers = {} if self.kid is None else {"kid": self.kid}
        return jwt.encode({**stated, **claims}, self.key, algorithm=self.algorithm, headers=headers)

    def jwk(self, **more: Any) -> dict[str, Any]:
        """The public key for a JWKS document."""
        kind = jwt.get_algorithm_by_name(self.algorithm)
        found = json.loads(kind.to_jwk(self.key.public_key()))
        named = {} if self.kid is None else {"kid": self.kid}
        return {**found, **named, "use": "sig", "alg": self.algorithm, **more}

    def pem(self) -> bytes:
        """The public key."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        data: bytes = self.key.public_key().public_bytes(serialization.Encoding.PEM, form)
        return data


def jwks(*signers: Signer) -> bytes:
    """A document with their keys."""
    return json.dumps({"keys": [one.jwk() for one in signers]}).encode()


@needed("processes")
class Served:
    """An HTTP server in a thread. It answers `body` with `status` when `gate` is open, or what `answer` says
    to the words of the request; `asked` has those.
    """

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.answer: Any = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[Mapping[str, str]] = []
        self.methods: list[str] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                """A question in the query."""
                self._reply(urlsplit(self.path).query)

            def do_POST(self) -> None:
                """A form."""
                self._reply(self.rfile.read(int(self.headers["content-length"])).decode())

            def _reply(self, words: str) -> None:
                said = {name: values[0] for name, values in parse_qs(words, keep_blank_values=True).items()}
                served.methods.append(self.command)
                served.asked.append(said)
                served.gate.wait(30)
                body = served.body if served.answer is None else served.answer(said).encode()
                self.send_response(served.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            """One thread for each connection."""

            def handle_error(self, *_: Any) -> None:
                """Clients go when they have waited long enough."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_port}/it"

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Serve no more; nobody listens at its port then."""
        self.gate.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


@contextmanager
def served() -> Iterator[Served]:
    """A server, as long as the block lasts."""
    one = Served()
    one.start()
    try:
        yield one
    finally:
        one.stop()


def certificate(folder: Path, name: str, **alternatives: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "plant"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    kinds: dict[str, Any] = {
        "dns": x509.DNSName,
        "email": x509.RFC822Name,
        "uri": x509.UniformResourceIdentifier,
    }
    others = [kinds[kind](value) for kind, value in alternatives.items()]
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([*others, x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths
