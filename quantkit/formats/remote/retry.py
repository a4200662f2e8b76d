"""Requests that fail: what the failure means, which of them are repeated, and when.

Exceptions of many libraries arrive here (botocore, aiohttp, httpx, fsspec's file systems), so they are told by status,
by the codes of S3 and by the names of their classes, not by importing them. No text of theirs is shown: it may hold
signed addresses.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from quantkit.errors import FormatError

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How often and how long a request is repeated. Pauses are random, up to ``first``, twice that, ... ``longest``."""

    attempts: int = 8
    first: float = 0.5
    longest: float = 20.0
    #: Seconds for all attempts and pauses together; no pause begins that would exceed it.
    together: float = 300.0

    def pause(self, failed: int, asked: float | None) -> float:
        """Return the seconds to wait after the ``failed``-th failure; ``asked``: those of Retry-After."""
        return max(asked or 0.0, random.uniform(0.1, 1.0) * min(self.longest, self.first * 2.0 ** (failed - 1)))


#: Of requests while work is under way, and of the first look at a URL, which may be mistyped.
PATIENCE, FIRST_LOOK = Patience(), Patience(attempts=4, together=60.0)
#: Seconds without a byte after which a connection counts as broken, and for a whole request.
SILENCE, REQUEST = 30.0, 600.0

#: Set when a run is given up: nobody waits any longer.
given_up = threading.Event()


class Meaning(Enum):
    """What becomes of a failed request."""

    AGAIN = "again"
    MISSING = "missing"
    DENIED = "denied"
    CHANGED = "changed"
    PRESENT = "present"
    GONE = "gone"
    OTHER = "other"


class Answer(Exception):
    """An answer of a server that is no success, or no good one; ``what`` is said of it."""

    def __init__(self, status: int, what: str = "", wait: str | None = None, meaning: Meaning | None = None) -> None:
        super().__init__(what or f"HTTP {status}")
        self.status, self.what, self.wait, self.meaning = status, what or f"HTTP {status}", wait, meaning


class Broken(Exception):
    """An answer that is not what it must be: cut off, or damaged on the way. The request is repeated."""


class Verdict(NamedTuple):
    """What a failure means, in words without secrets, and the seconds that the server asks to wait."""

    meaning: Meaning
    why: str
    wait: float | None = None


_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_CODES = {
    **dict.fromkeys(("NoSuchKey", "NoSuchBucket"), Meaning.MISSING),
    **dict.fromkeys(("NoSuchUpload",), Meaning.GONE),
    **dict.fromkeys(
        (
            "AccessDenied",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "InvalidToken",
            "AllAccessDisabled",
        ),
        Meaning.DENIED,
    ),
    **dict.fromkeys(
        ("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException")
        + ("BadDigest", "IncompleteBody", "ClientDisconnect", "OperationAborted", "XAmzContentSHA256Mismatch"),
        Meaning.AGAIN,
    ),
}
#: Classes of exceptions, by name, of connections that fail.
_CONNECTIONS = {
    *("HTTPClientError", "ClientConnectionError", "ClientPayloadError", "ClientOSError", "ServerTimeoutError"),
    *("ConnectionError", "ConnectionResetError", "TimeoutError", "IncompleteReadError", "IncompleteRead"),
    *("TransportError", "ProtocolError", "ChunkedEncodingError", "FSTimeoutError", "ResponseStreamingError"),
    *("ResponseParserError", "HTTPException", "ServerDisconnectedError", "SSLError", "gaierror"),
}
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
_CREDENTIALS |= {"TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "DefaultCredentialsError"}


def judge(e: BaseException) -> Verdict:
    """Return what a failed request means."""
    seen = list(_chain(e))
    for each in seen:
        if isinstance(each, Answer):
            meaning = each.meaning or _of_status(each.status)
            return Verdict(meaning, each.what, _seconds(each.wait))
        if isinstance(each, Broken):
            return Verdict(Meaning.AGAIN, str(each))
    for each in seen:
        if _CREDENTIALS & _names(each):
            return Verdict(Meaning.DENIED, "there are no credentials for it")
    for each in seen:
        if isinstance(getattr(each, "response", None), dict):
            return _of_answer(*_answer_of(each))
        if _CONNECTIONS & _names(each):
            return Verdict(Meaning.AGAIN, _CONNECTION_WORDS.get(type(each).__name__, type(each).__name__))
    for each in seen:
        found = _answer_of(each)
        if found[0] or found[1]:
            return _of_answer(*found)
    for each in seen:
        if isinstance(each, FileNotFoundError):
            return Verdict(Meaning.MISSING, "there is no such file")
        if isinstance(each, PermissionError):
            return Verdict(Meaning.DENIED, "access is denied")
    return Verdict(Meaning.OTHER, type(e).__name__ + (f" ({e.strerror})" if isinstance(e, OSError) and e.errno else ""))


_CONNECTION_WORDS = {
    **dict.fromkeys(("TimeoutError", "FSTimeoutError", "ReadTimeoutError", "ServerTimeoutError"), "no answer in time"),
    **dict.fromkeys(("SocketTimeoutError", "ConnectTimeoutError", "ConnectionTimeoutError"), "no answer in time"),
    **dict.fromkeys(("EndpointConnectionError", "ClientConnectorError", "gaierror"), "the server cannot be reached"),
    **dict.fromkeys(("ClientConnectorDNSError", "ConnectionRefusedError"), "the server cannot be reached"),
}


def _of_answer(status: int, code: str, wait: str | None) -> Verdict:
    code = "" if code.isdecimal() else code
    why = f"HTTP {status}" + (f" ({code})" if code else "") if status else code
    return Verdict(_CODES.get(code, _of_status(status)), why, _seconds(wait))


def _chain(e: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from."""
    found: BaseException | None = e
    for _ in range(8):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _names(e: BaseException) -> set[str]:
    return {each.__name__ for each in type(e).__mro__}


def _answer_of(e: Any) -> tuple[int, str, str | None]:
    """Return status, S3's code and Retry-After of an exception that stands for an answer; 0, "" and None without."""
    response = getattr(e, "response", None)
    if isinstance(response, dict):  # botocore
        meta = response.get("ResponseMetadata", {})
        status = int(meta.get("HTTPStatusCode") or 0)
        return status, str(response.get("Error", {}).get("Code", "")), meta.get("HTTPHeaders", {}).get("retry-after")
    if response is not None:  # requests, httpx
        headers = getattr(response, "headers", None) or {}
        return int(getattr(response, "status_code", 0) or 0), "", headers.get("Retry-After")
    for name in ("status", "code"):  # aiohttp, gcsfs
        found = getattr(e, name, None)
        if isinstance(found, int) and 100 <= found < 600:
            return found, "", (getattr(e, "headers", None) or {}).get("Retry-After")
    return 0, "", None


def _of_status(status: int) -> Meaning:
    if status in _AGAIN:
        return Meaning.AGAIN
    found = {401: Meaning.DENIED, 403: Meaning.DENIED, 404: Meaning.MISSING, 410: Meaning.MISSING}
    return {**found, 412: Meaning.CHANGED, 416: Meaning.CHANGED}.get(status, Meaning.OTHER)


def _seconds(wait: str | None) -> float | None:
    """Return the seconds of a Retry-After, a number or a date."""
    if not wait:
        return None
    try:
        return max(0.0, float(wait))
    except ValueError:
        pass
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(wait).timestamp() - time.time())
    except ValueError:
        return None


def patiently(where: object, request: Callable[[], T], patience: Patience | None = None) -> T:
    """Return what a request gives; repeat it while its failures may pass.

    Raises FormatError if the object was replaced, else OSError: FileNotFoundError, PermissionError or, when patience is
    at its end, one of errno EIO; FileExistsError where something is there that must not be. ``where`` is named in it.
    """
    patience = patience or PATIENCE
    began = time.monotonic()
    for attempt in range(1, patience.attempts + 1):
        try:
            return request()
        except Exception as e:
            verdict = judge(e)
            if verdict.meaning is not Meaning.AGAIN:
                raise error_of(where, verdict) from None
            pause = patience.pause(attempt, verdict.wait)
            took = time.monotonic() - began
            if attempt == patience.attempts or took + pause > patience.together or given_up.wait(pause):
                why = f"{verdict.why}; given up after {attempt} attempts in {time.monotonic() - began:.0f} s"
                raise OSError(errno.EIO, why, str(where)) from None
    raise AssertionError


def error_of(where: object, verdict: Verdict) -> Exception:
    """Return the error that tells a user of a failure that will not pass."""
    why = verdict.why
    if verdict.meaning is Meaning.CHANGED:
        return FormatError(f"{where}: it was replaced by another object, or cut, while it was read; begin anew ({why})")
    if verdict.meaning is Meaning.MISSING:
        return FileNotFoundError(errno.ENOENT, f"there is nothing of this name ({why})", str(where))
    if verdict.meaning is Meaning.DENIED:
        return PermissionError(
            errno.EACCES, f"access is denied ({why}); check the credentials and their rights", str(where)
        )
    if verdict.meaning is Meaning.PRESENT:
        return FileExistsError(errno.EEXIST, why, str(where))
    if verdict.meaning is Meaning.GONE:
        return ProcessLookupError(errno.ESRCH, why, str(where))
    return OSError(errno.EIO, f"the request failed: {why}", str(where))
