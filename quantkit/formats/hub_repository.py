"""A model repository of the Hugging Face Hub that files are uploaded to, by huggingface_hub.

Credentials are huggingface_hub's own (HF_TOKEN, or ``hf auth login``); no text of an error contains them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import FormatError, ResourceError
from quantkit.extras import HUB, check_extras
from quantkit.formats.remote.retry import FailureKind, Verdict, judge

T = TypeVar("T")

#: The length of a server's explanation that is shown.
_MAX_REASON = 300
_SECRETS = re.compile(r"\bhf_\w+|\b[A-Za-z]+://\S+")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository; ``sha256`` of one in LFS, ``git_sha1``, its blob's name, of another."""

    nbytes: int
    sha256: str | None
    git_sha1: str

    def matches(self, path: Path, sha256: str) -> bool:
        """Return whether a file with this SHA-256 has the same bytes. Raises OSError."""
        if self.sha256 is not None:
            return self.sha256 == sha256
        return path.stat().st_size == self.nbytes and _git_sha1(path) == self.git_sha1


class Repository:
    """A model repository: ``name`` is ORGANIZATION/REPOSITORY, ``revision`` a branch, None for the main one.

    All methods raise ResourceError if the Hub refuses a request or cannot be reached.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        check_extras(HUB)
        from huggingface_hub import HfApi

        self.name, self.revision = name, revision
        self._api = HfApi()

    def is_private(self) -> bool | None:
        """Return whether the repository is private; None if there is none."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return bool(self._call("read it", lambda: self._api.model_info(self.name).private, RepositoryNotFoundError))
        except RepositoryNotFoundError:
            return None

    def files(self, paths: Sequence[str], commit: str | None = None) -> dict[str, RemoteFile]:
        """Return those of these files that the revision, or a commit, has."""
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import RevisionNotFoundError

        def ask() -> list[Any]:
            return self._api.get_paths_info(self.name, list(paths), revision=commit or self.revision)

        try:
            entries = self._call("list its files", ask, RevisionNotFoundError)
        except RevisionNotFoundError:
            return {}
        return {
            entry.path: RemoteFile(entry.size, None if entry.lfs is None else entry.lfs.sha256, entry.blob_id)
            for entry in entries
            if isinstance(entry, RepoFile)
        }

    def check_card(self, path: Path) -> None:
        """Raise FormatError for a model card that the Hub would refuse after all files were sent."""
        from huggingface_hub import ModelCard
        from yaml import YAMLError

        try:
            card = ModelCard(path.read_text("utf-8"))
        except UnicodeDecodeError as e:
            raise FormatError(f"{path}: not a text file (byte {e.start} is not UTF-8)", "QK-E121") from None
        except (ValueError, YAMLError) as e:
            raise FormatError(f"{path}: its front matter is damaged: {_clean(str(e))}", "QK-E111") from None
        try:
            self._call("check the card", card.validate, ValueError)
        except ValueError as e:
            raise FormatError(f"{path}: the Hub refuses its front matter: {_clean(str(e))}", "QK-E111") from None

    def create(self, *, private: bool) -> None:
        """Create the repository, unless it exists."""
        self._call("create it", lambda: self._api.create_repo(self.name, private=private or None, exist_ok=True))

    def create_branch(self) -> None:
        """Create the branch of ``revision`` from the main one, unless it exists."""
        if self.revision is not None:
            branch = self.revision
            self._call("create a branch", lambda: self._api.create_branch(self.name, branch=branch, exist_ok=True))

    def send(self, name: str, path: Path, sha256: str) -> Any:
        """Send the bytes of a file, unless the Hub has them; return the addition, which ``commit`` makes visible."""
        from huggingface_hub import CommitOperationAdd

        addition = CommitOperationAdd(name, str(path))
        addition.upload_info.sha256 = bytes.fromhex(sha256)
        self._call(
            f"upload {name}",
            lambda: self._api.preupload_lfs_files(
                self.name, [addition], revision=self.revision, free_memory=False, num_threads=1
            ),
        )
        return addition

    def commit(self, additions: Sequence[Any], message: str) -> tuple[str, str]:
        """Make files visible, all at once; return the id of the commit and its address."""
        info = self._call(
            "commit",
            lambda: self._api.create_commit(self.name, additions, commit_message=message, revision=self.revision),
        )
        return str(info.oid), str(info.commit_url)

    def _call(self, action: str, request: Callable[[], T], *expected: type[BaseException]) -> T:
        try:
            return request()
        except expected:
            raise
        except Exception as e:
            verdict = judge(e)
            raise ResourceError(
                f"{self.name}: cannot {action} on the Hub: {_reason(e, verdict)}{_advice(verdict)}", "QK-E412"
            ) from None


def show_progress(enabled: bool) -> None:
    """Have huggingface_hub draw bars, or not."""
    from huggingface_hub import utils

    getattr(utils, "enable_progress_bars" if enabled else "disable_progress_bars")()


def _reason(e: Exception, verdict: Verdict) -> str:
    """Return a failure in words, with the server's explanation."""
    answers = (getattr(error, "server_message", None) for error in (e, e.__cause__))
    text = _clean(next(filter(None, answers), None) or (str(e) if type(e) is ValueError else ""))
    if not text:
        return verdict.reason
    return f"{verdict.reason}: {text}" if verdict.status else text


def _clean(text: str) -> str:
    """Return a text on one line, without addresses and tokens."""
    from huggingface_hub import get_token

    if token := get_token():
        text = text.replace(token, "..")
    return " ".join(_SECRETS.sub("..", text).split())[:_MAX_REASON]


def _advice(verdict: Verdict) -> str:
    if verdict.kind is FailureKind.DENIED or verdict.status == 404:
        return "; log in by hf auth login, or set HF_TOKEN, with a token that may write to it"
    if verdict.kind is FailureKind.RETRY:
        return "; check the connection and run the command again"
    return ""


def _git_sha1(path: Path) -> str:
    """Return the name that git gives a file as a blob."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
