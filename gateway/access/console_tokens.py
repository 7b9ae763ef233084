"""Bearer tokens of the console: created with a name, listed by that name, and revoked.

Only a digest of each token is stored, in one file that only its owner may read. The first start creates a
token for the administrator and writes its text to a file in the same folder. Each start also creates a token
for the command line, which is valid as long as the process runs. The command line finds that token in a
folder that only the same user of this machine can read, in a file named after the port.

A newer gateway may store properties of a token that this one does not know, such as a restriction. Such a
token is not valid here, and stays in the file for the newer one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import orjson
import structlog

from gateway import clock
from gateway.access.principal import Principal
from gateway.errors import ConfigurationError
from gateway.model.shares import OPERATOR, UserShares

TOKENS_MAX: Final = 1_000
EXPIRED_SECS: Final = 30 * 86_400.0  # until an expired token is deleted: a clock that is ahead deletes none
NAME_MAX: Final = 100
TOKEN_BYTES: Final = 32
PREFIX: Final = "gw_"  # so that people and scanners of repositories recognize a token
FILE: Final = "tokens.json"
ADMINISTRATOR: Final = "administrator"
COMMAND_LINE: Final = "command line"

log = structlog.get_logger()


class TokenRefused(Exception):
    """Error for a token that cannot be created; the text gives the reason."""


class TokenConflictError(TokenRefused):
    """Error for a token that cannot be created because its name is in use, or there are too many tokens."""


class TokenShareFull(TokenRefused):
    """Error for a token that cannot be created because its user has as many tokens as one user may have."""


class Maker(NamedTuple):
    """User who created a token, at the console or by means of another token.

    `backend` is the kind of the back end that authenticated the user, and `roles` are the roles that the back
    end gave. `stamp` is a digest of the user's password at that time (`Access.stamp`). The token becomes
    invalid when this user is deleted or changes its password.
    """

    name: str
    backend: str
    roles: tuple[str, ...]
    stamp: str

    @property
    def principal(self) -> Principal:
        """Principal of the user. Scopes, fields and expiry are omitted: they belong to a single login."""
        return Principal(self.name, roles=self.roles, backend=self.backend)


class StoredToken(NamedTuple):
    """API token as it is stored, without its secret text.

    `digest` is the digest of the secret. `console` is the token's right. `bodies` permits reading the bodies
    of messages; the right `write` always includes this. `by` names the caller who created the token. `maker`
    is that user, or None for an administrator. `made` and `expires` are in seconds since 1970; a token
    without `expires` never expires.
    """

    name: str
    digest: str
    console: Literal["read", "write"]
    by: str
    made: float
    expires: float | None = None
    bodies: bool = False
    maker: Maker | None = None

    @property
    def principal(self) -> Principal:
        """Principal of requests with this token: the user who created it.

        The principal of an administrator's token has the name of the token.
        """
        name = self.name if self.maker is None else self.maker.name
        return Principal(name, expires=self.expires)

    def to_document(self) -> dict[str, Any]:
        """Return the token as a JSON object of the API (TokenRow), without its digest."""
        row = self._asdict()
        del row["digest"]
        row["user"] = None if self.maker is None else self.maker.name
        del row["maker"]
        return row

    def to_record(self) -> dict[str, Any]:
        """Return the token as a JSON object for the token file."""
        return self._asdict() | {"maker": None if self.maker is None else self.maker._asdict()}


KEYS: Final = frozenset(StoredToken._fields)


class ConsoleTokens:
    """API tokens that were created at the console of a gateway.

    They are stored in a file in `folder`, or only in memory if `folder` is None.
    """

    def __init__(self, folder: Path | None = None, shares: UserShares | None = None) -> None:
        """Read the stored tokens. If there is no token file yet, create the administrator's token.

        `shares` limits the number of tokens in total and per user. Raises ConfigurationError if the folder or
        the token file cannot be used.
        """
        self._folder = folder
        self._shares = shares or UserShares("console tokens", count_max=TOKENS_MAX)
        self._tokens: dict[str, StoredToken] = {}  # by digest
        self._temporary: dict[str, StoredToken] = {}
        self._unknown: list[dict[str, Any]] = []  # of a newer gateway, as the file stores them
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (folder / FILE).exists():
                self._read(folder / FILE)
            else:
                text = self.make(ADMINISTRATOR, "write", by="the first start")
                write_private_file(folder / f"{ADMINISTRATOR}.token", text + "\n")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"{folder}: the console's tokens cannot be used: {error}") from error

    def _read(self, path: Path) -> None:
        for record in orjson.loads(path.read_bytes())["tokens"][:TOKENS_MAX]:
            if not record.keys() <= KEYS:
                self._unknown.append(record)
                continue
            maker = record.get("maker")
            if maker is not None:
                record["maker"] = Maker(**maker | {"roles": tuple(maker["roles"])})
            token = StoredToken(**record)
            self._tokens[token.digest] = token
        if self._unknown:
            log.warning("console tokens of a newer gateway not valid here", tokens=len(self._unknown))

    def _save(self) -> None:
        """Write the tokens to the token file. Raises OSError."""
        if self._folder is not None:
            document = {"tokens": [token.to_record() for token in self._tokens.values()] + self._unknown}
            write_private_file(
                self._folder / FILE, orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
            )

    def make(
        self,
        name: str,
        console: Literal["read", "write"],
        *,
        by: str,
        expires: float | None = None,
        bodies: bool = False,
        maker: Maker | None = None,
    ) -> str:
        """Create a token and return its secret text, which is not stored.

        Tokens that expired more than EXPIRED_SECS ago are deleted. Other expired tokens still count, but
        their maker may use their names again. Raises TokenRefused if the name does not have 1 to NAME_MAX
        printable characters, TokenConflictError if the name is in use or there are TOKENS_MAX tokens,
        TokenShareFull if the maker has too many tokens, and OSError if the token cannot be stored.
        """
        if not 0 < len(name) <= NAME_MAX or not name.isprintable():
            raise TokenRefused(f"a token's name has 1 to {NAME_MAX} characters")
        now = clock.unix_time()
        self._tokens = {
            digest: one
            for digest, one in self._tokens.items()
            if one.expires is None or one.expires + EXPIRED_SECS > now
        }
        namesakes = [token for token in self._tokens.values() if token.name == name]
        if any(self.is_valid(one.digest) or _owner_of(one.maker) != _owner_of(maker) for one in namesakes):
            raise TokenConflictError(f"a token with the name {name!r} exists already")
        self._check_share(maker)
        text, digest = _generate_token()
        self._tokens[digest] = StoredToken(name, digest, console, by, now, expires, bodies, maker)
        try:
            self._save()
        except OSError:
            del self._tokens[digest]
            raise
        return text

    def _check_share(self, maker: Maker | None) -> None:
        """Raise an error if `maker` may not create another token.

        Raises TokenConflictError at the limit of all tokens, and TokenShareFull at the limit of one user.
        Administrators, who may revoke all tokens, have no limit of their own.
        """
        shares = self._shares
        owners = Counter([_owner_of(one.maker) for one in self._tokens.values()])
        shares.replace({owner: (count, 0) for owner, count in owners.items()})
        if limit := shares.exceeded_total_limit(0):
            shares.refuse("" if maker is None else maker.name, limit, 1)
            raise TokenConflictError(
                f"the maximum of {shares.count_max} tokens is reached: revoke another token first"
            )
        if maker is not None and (limit := shares.refuse_if_full(maker.name, 0)):
            raise TokenShareFull(f"{limit} is reached: revoke another token first")

    def make_temporary(self, name: str) -> str:
        """Create a token with all rights, which is valid while this process runs. Return its secret text."""
        text, digest = _generate_token()
        self._temporary[digest] = StoredToken(name, digest, "write", "this process", clock.unix_time())
        return text

    def revoke(self, name: str) -> bool:
        """Delete all tokens with this name, including expired ones. Return False if there is none.

        Raises OSError if the token file cannot be written; the tokens then stay valid.
        """
        before = self._tokens, self._unknown
        self._tokens = {digest: one for digest, one in self._tokens.items() if one.name != name}
        self._unknown = [one for one in self._unknown if one.get("name") != name]
        if (self._tokens, self._unknown) == before:
            return False
        try:
            self._save()
        except OSError:
            self._tokens, self._unknown = before
            raise
        return True

    def find(self, text: str) -> StoredToken | None:
        """Return the token with this secret text, or None if there is no such token or it has expired."""
        return self.by_digest(_digest(text))

    def is_valid(self, digest: str) -> bool:
        """Return True if a token with this digest exists and has not expired."""
        token = self._tokens.get(digest) or self._temporary.get(digest)
        return token is not None and (token.expires is None or token.expires > clock.unix_time())

    def by_digest(self, digest: str) -> StoredToken | None:
        """Return the token with this digest, or None if there is no such token or it has expired."""
        return (self._tokens.get(digest) or self._temporary.get(digest)) if self.is_valid(digest) else None

    def all(self) -> list[StoredToken]:
        """Return the stored tokens, without temporary ones."""
        return list(self._tokens.values())


def _owner_of(maker: Maker | None) -> str:
    return OPERATOR if maker is None else maker.name


def _generate_token() -> tuple[str, str]:
    text = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    return text, _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def write_private_file(path: Path, text: str) -> None:
    """Write `text` to a file that only its owner may read, atomically.

    Raises OSError; an existing file of this name is then unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# Folders through which a process passes its token to the command line of the same user.


def local_token_folders() -> list[Path]:
    """Return the folders in which a gateway stores tokens for local commands of the same user.

    The folders are in order of preference, and may not exist. The system's temporary folder is omitted if it
    cannot be determined.
    """
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(runtime_folder) / "gateway"] if runtime_folder else []
    try:
        found.append(Path(tempfile.gettempdir()) / f"gateway-{os.geteuid()}")
    except FileNotFoundError as error:
        log.debug("temporary folder missing", error=str(error))
    return found


def _is_ours(folder: Path) -> bool:
    """Return True if the folder belongs to this user and other users have no access to it.

    Raises OSError if the folder does not exist.
    """
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def leave_token(port: int, text: str) -> Path | None:
    """Write the token `text` to a file, for commands that the same user runs on this machine.

    The file is named after the HTTP port. Return its path, or None if no folder can be used.
    """
    for folder in local_token_folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(folder):
                write_private_file(folder / f"{port}.token", text + "\n")
                return folder / f"{port}.token"
        except OSError as error:
            log.info("token file for local commands not written", folder=str(folder), error=str(error))
    return None


def left_tokens(port: int) -> list[Path]:
    """Return the paths of files with tokens that a gateway at this HTTP port has written for this user."""
    found = []
    for folder in local_token_folders():
        try:
            if _is_ours(folder) and (folder / f"{port}.token").is_file():
                found.append(folder / f"{port}.token")
        except OSError:
            continue  # the folder does not exist
    return found
