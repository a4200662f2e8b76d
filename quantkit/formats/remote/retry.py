"""Failed requests: the kind of a failure, whether it is retried, and when.

Exceptions come from many libraries (botocore, aiohttp, httpx, fsspec's file systems), so they are classified by status,
S3 code and class name, without importing these. Their text is never shown: it may contain signed addresses.
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
    """The limits of retries. Pauses are random, up to ``first``, twice that, ... ``longest``."""

    attempts: int = 8
    first: float = 0.5
    longest: float = 20.0
    #: Seconds for all attempts and pauses together; a pause that would exceed it does not begin.
    total_seconds: float = 300.0

    def pause(self, failures: int, requested: float | None) -> float:
        """Return the seconds to wait after a number of ``failures``; ``requested``: by Retry-After."""
        return max(requested or 0.0, random.uniform(0.1, 1.0) * min(self.longest, self.first * 2.0 ** (failures - 1)))


#: For requests during a run, and for the first request of a URL, which may be mistyped.
PATIENCE, FIRST_LOOK = Patience(), Patience(attempts=4, total_seconds=60.0)
#: Seconds without a byte after which a connection counts as broken, and for a whole request.
SILENCE, REQUEST = 30.0, 600.0

#: Set when a run is abandoned, so that no retry waits.
cancelled = threading.Event()


class FailureKind(Enum):
    """The kind of a failure, which decides whether the request is repeated."""

    RETRY = "retry"
    MISSING = "missing"
    DENIED = "denied"
    CHANGED = "changed"
    PRESENT = "present"
    EXPIRED = "expired"
    UNKNOWN = "unknown"


class Answer(Exception):
    """A server's response with an error status, or an invalid one."""

    def __init__(
        self, status: int, message: str = "", wait: str | None = None, kind: FailureKind | None = None
    ) -> None:
        super().__init__(message or f"HTTP {status}")
        self.status = status
        self.message = message or f"HTTP {status}"
        self.wait = wait
        self.kind = kind


class BrokenAnswer(Exception):
    """A truncated or damaged response. The request is repeated."""


class Verdict(NamedTuple):
    """The kind of a failure, a reason without secrets, the seconds to wait that the server requests, its HTTP "
    "status."""

    kind: FailureKind
    reason: str
    wait: float | None = None
    status: int = 0


_RETRY_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_CODES = {
    **dict.fromkeys(("NoSuchKey", "NoSuchBucket"), FailureKind.MISSING),
    **dict.fromkeys(("NoSuchUpload",), FailureKind.EXPIRED),
    **dict.fromkeys(
        (
            "AccessDenied",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "InvalidToken",
            "AllAccessDisabled",
        ),
        FailureKind.DENIED,
    ),
    **dict.fromkeys(
        ("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException")
        + ("BadDigest", "IncompleteBody", "ClientDisconnect", "OperationAborted", "XAmzContentSHA256Mismatch"),
        FailureKind.RETRY,
    ),
}
#: Classes of exceptions, by name, for failed connections.
_CONNECTIONS = {
    "HTTPClientError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ClientOSError",
    "ServerTimeoutError",
    "ConnectionError",
    "ConnectionResetError",
    "TimeoutError",
    "IncompleteReadError",
    "IncompleteRead",
    "TransportError",
    "ProtocolError",
    "ChunkedEncodingError",
    "FSTimeoutError",
    "ResponseStreamingError",
    "ResponseParserError",
    "HTTPException",
    "ServerDisconnectedError",
    "SSLError",
    "gaierror",
}
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
_CREDENTIALS |= {"TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "DefaultCredentialsError"}


def judge(e: BaseException) -> Verdict:
    """Return the kind of a failed request."""
    chain = list(_chain(e))
    for error in chain:
        if isinstance(error, Answer):
            kind = error.kind or _status_kind(error.status)
            return Verdict(kind, error.message, _retry_after_seconds(error.wait), error.status)
        if isinstance(error, BrokenAnswer):
            return Verdict(FailureKind.RETRY, str(error))
    for error in chain:
        if _CREDENTIALS & _class_names(error):
            return Verdict(FailureKind.DENIED, "no credentials")
    for error in chain:
        if isinstance(getattr(error, "response", None), dict):
            return _judge_answer(*_answer_of(error))
        if _CONNECTIONS & _class_names(error):
            return Verdict(FailureKind.RETRY, _CONNECTION_WORDS.get(type(error).__name__, type(error).__name__))
    for error in chain:
        answer = _answer_of(error)
        if answer[0] or answer[1]:
            return _judge_answer(*answer)
    for error in chain:
        if isinstance(error, FileNotFoundError):
            return Verdict(FailureKind.MISSING, "no such file")
        if isinstance(error, PermissionError):
            return Verdict(FailureKind.DENIED, "access is denied")
    return Verdict(
        FailureKind.UNKNOWN, type(e).__name__ + (f" ({e.strerror})" if isinstance(e, OSError) and e.errno else "")
    )


_CONNECTION_WORDS = {
    **dict.fromkeys(("TimeoutError", "FSTimeoutError", "ReadTimeoutError", "ServerTimeoutError"), "no answer in time"),
    **dict.fromkeys(("SocketTimeoutError", "ConnectTimeoutError", "ConnectionTimeoutError"), "no answer in time"),
    **dict.fromkeys(("EndpointConnectionError", "ClientConnectorError", "gaierror"), "the server cannot be reached"),
    **dict.fromkeys(("ClientConnectorDNSError", "ConnectionRefusedError"), "the server cannot be reached"),
}


def _judge_answer(status: int, code: str, wait: str | None) -> Verdict:
    code = "" if code.isdecimal() else code
    reason = f"HTTP {status}" + (f" ({code})" if code else "") if status else code
    return Verdict(_CODES.get(code, _status_kind(status)), reason, _retry_after_seconds(wait), status)


def _chain(e: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that caused it."""
    error: BaseException | None = e
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _class_names(e: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(e).__mro__}


def _answer_of(e: Any) -> tuple[int, str, str | None]:
    """Return status, S3's code and Retry-After of an exception for a response; 0, "" and None if missing."""
    response = getattr(e, "response", None)
    if isinstance(response, dict):  # botocore
        meta = response.get("ResponseMetadata", {})
        status = int(meta.get("HTTPStatusCode") or 0)
        return status, str(response.get("Error", {}).get("Code", "")), meta.get("HTTPHeaders", {}).get("retry-after")
    if response is not None:  # requests, httpx
        headers = getattr(response, "headers", None) or {}
        return int(getattr(response, "status_code", 0) or 0), "", headers.get("Retry-After")
    for name in ("status", "code"):  # aiohttp, gcsfs
        value = getattr(e, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value, "", (getattr(e, "headers", None) or {}).get("Retry-After")
    return 0, "", None


def _status_kind(status: int) -> FailureKind:
    if status in _RETRY_STATUSES:
        return FailureKind.RETRY
    meanings = {401: FailureKind.DENIED, 403: FailureKind.DENIED, 404: FailureKind.MISSING, 410: FailureKind.MISSING}
    return {**meanings, 412: FailureKind.CHANGED, 416: FailureKind.CHANGED}.get(status, FailureKind.UNKNOWN)


def _retry_after_seconds(wait: str | None) -> float | None:
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


def with_retries(where: object, request: Callable[[], T], patience: Patience | None = None) -> T:
    """Return the result of a request; repeat it while its failures may be temporary.

    Raises FormatError if the object was replaced, else OSError: FileNotFoundError, PermissionError or, after the last
    attempt, one with errno EIO; FileExistsError if an object exists that must not. ``where`` is named in it.
    """
    patience = patience or PATIENCE
    began = time.monotonic()
    for attempt in range(1, patience.attempts + 1):
        try:
            return request()
        except Exception as e:
            verdict = judge(e)
            if verdict.kind is not FailureKind.RETRY:
                raise error_of(where, verdict) from None
            pause = patience.pause(attempt, verdict.wait)
            took = time.monotonic() - began
            if attempt == patience.attempts or took + pause > patience.total_seconds or cancelled.wait(pause):
                reason = f"{verdict.reason}; gave up after {attempt} attempts in {time.monotonic() - began:.0f} s"
                raise OSError(errno.EIO, reason, str(where)) from None
    raise AssertionError


def error_of(where: object, verdict: Verdict) -> Exception:
    """Return the error for a permanent failure."""
    reason = verdict.reason
    if verdict.kind is FailureKind.CHANGED:
        return FormatError(
            f"{where}: the object was replaced or truncated while it was being read; start over ({reason})", "QK-E109"
        )
    if verdict.kind is FailureKind.MISSING:
        return FileNotFoundError(errno.ENOENT, f"no such object ({reason})", str(where))
    if verdict.kind is FailureKind.DENIED:
        return PermissionError(
            errno.EACCES, f"access is denied ({reason}); check the credentials and their rights", str(where)
        )
    if verdict.kind is FailureKind.PRESENT:
        return FileExistsError(errno.EEXIST, reason, str(where))
    if verdict.kind is FailureKind.EXPIRED:
        return ProcessLookupError(errno.ESRCH, reason, str(where))
    return OSError(errno.EIO, f"the request failed: {reason}", str(where))
