"""Upload files to a model repository of the Hugging Face Hub: ``quantkit upload``.

A file of GGUF is complete before it is sent: all shards are there, none is being written. The bytes of all files are
sent first, each only once; a commit then makes them visible together, and their digests are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path, PurePosixPath

from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError, ResourceError, os_error_code
from quantkit.formats.files import File, check_unchanged
from quantkit.formats.gguf import open_first_shard, open_gguf, parse_split_path, split_path
from quantkit.formats.hub_repository import RemoteFile, Repository
from quantkit.formats.locks import drop_lock, take_lock
from quantkit.formats.outputs import lock_path
from quantkit.hash import file_digests
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.pipeline.run import journal_path
from quantkit.progress import ProgressCallback
from quantkit.units import format_size

#: The Hub's limit of a file, in bytes.
MAX_FILE = 50 * 10**9
CARD = "README.md"
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
#: Endings of files that a run is still writing, or needs itself.
_UNFINISHED = (".part", ".partial", ".incomplete", ".joining", ".join", ".lock", ".journal", ".quantkit-header")


class State(Enum):
    """State of a file in the repository: missing, with the same bytes, or with different ones."""

    NEW = "new"
    PRESENT = "present"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A file to upload: ``path`` here, ``name`` in the repository; ``sha256``, if it was already needed.

    ``missing``: shards of its model that are not here.
    """

    path: Path
    name: str
    nbytes: int
    state: State = State.NEW
    sha256: str | None = None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class UploadPlan(HtmlTable):
    """The plan of an upload.

    Attributes:
        repository: ORGANIZATION/REPOSITORY.
        revision: the branch, None for the main one.
        exists: whether the repository is there.
        private: whether it is private, or will be.
        files: all files, also those that the repository has.
    """

    repository: str
    revision: str | None
    exists: bool
    private: bool
    files: tuple[UploadFile, ...]

    @property
    def pending(self) -> tuple[UploadFile, ...]:
        """The files that have to be sent."""
        return tuple(file for file in self.files if file.state is not State.PRESENT)

    @property
    def nbytes(self) -> int:
        """The bytes of the files that have to be sent."""
        return sum(file.nbytes for file in self.pending)

    def as_table(self) -> Table:
        """Return the files with size and state."""
        rows = [(file.name, file.nbytes, file.state.value) for file in self.files]
        return table_of("file, bytes, state", rows, self.repository)


@dataclass(frozen=True)
class UploadResult(HtmlTable):
    """An upload: the files with their SHA-256, and the address of the commit, None if the repository had them all."""

    plan: UploadPlan
    files: tuple[UploadFile, ...]
    commit: str | None

    def as_table(self) -> Table:
        """Return the files with size, state before the upload, and SHA-256."""
        rows = [(file.name, file.nbytes, file.state.value, file.sha256) for file in self.files]
        return table_of("file, bytes, state, sha256", rows, self.commit or self.plan.repository)


@checked
def upload(
    repository: str,
    files: Sequence[str | Path],
    *,
    card: str | Path | None = None,
    folder: str | None = None,
    private: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> UploadResult:
    """Upload files to a model repository of the Hugging Face Hub, which is created if there is none.

    Shards go into a folder with the name of their model, other files to the top. The first shard may be here alone if
    the repository has the others: it goes beside them. Files that the repository has with the same bytes are not sent,
    nor bytes that an interrupted call has sent. After the commit, the digests that the
    Hub reports are compared with those of the local files.

    Args:
        repository: ORGANIZATION/REPOSITORY.
        files: GGUF files, of a shard all of its model, and any others.
        card: the model card, which is called README.md there.
        folder: a folder of the repository for all ``files``, "." for the top.
        private: create the repository as a private one.
        revision: a branch, created if there is none.
        overwrite: replace files that the repository has with other bytes; its history keeps these.
        threads: None for all available CPUs.
        progress: called with the bytes whose digest was computed.

    Raises:
        FormatError: a file is damaged, a shard is missing, or a file differs on the Hub.
        RecipeError: a name or a combination of arguments that is not possible.
        ResourceError: a file is too large or is being written, or the Hub refuses the upload.
    """
    plan = plan_upload(repository, files, card=card, folder=folder, private=private, revision=revision, threads=threads)
    return run_upload(plan, overwrite=overwrite, threads=threads, progress=progress)


@checked
def plan_upload(
    repository: str,
    files: Sequence[str | Path],
    *,
    card: str | Path | None = None,
    folder: str | None = None,
    private: bool = False,
    revision: str | None = None,
    threads: int | None = None,
) -> UploadPlan:
    """Plan an upload: read headers and ask the Hub, but send nothing; arguments and errors as for ``upload``."""
    if not _NAME.fullmatch(repository):
        raise RecipeError(f"{repository}: write ORGANIZATION/REPOSITORY", "QK-E203")
    if not files and card is None:
        raise RecipeError("no file to upload: give GGUF files, or a model card", "QK-E214")
    local = list(_local_files(files, card, _folder(folder)))
    _check_names(local)
    hub = Repository(repository, revision)
    if card is not None:
        hub.check_card(Path(card))
    is_private = hub.is_private()
    if private and is_private is False:
        raise RecipeError(
            f"{repository}: exists and is public: omit --private, or make it private in its settings first", "QK-E201"
        )
    exists = is_private is not None
    local = [_beside_shards(hub, file, _folder(folder), exists=exists) if file.missing else file for file in local]
    remote = hub.files([file.name for file in local]) if exists else {}
    return UploadPlan(
        repository,
        revision,
        exists,
        private if is_private is None else is_private,
        tuple(_with_states(local, remote, threads)),
    )


@checked
def run_upload(
    plan: UploadPlan,
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> UploadResult:
    """Carry out a plan of ``plan_upload``; arguments and errors as for ``upload``."""
    if not overwrite and (names := [file.name for file in plan.files if file.state is State.DIFFERENT]):
        raise ResourceError(
            f"{plan.repository}: has another {names[0]}{f' and {len(names) - 1} others' * (len(names) > 1)}; "
            "--overwrite replaces it (its history keeps the present one)",
            "QK-E402",
        )
    if not plan.pending:
        return UploadResult(plan, plan.files, None)
    with ExitStack() as stack:
        paths = [file.path for file in plan.files]
        for path in paths:
            _hold(stack, path)
        unhashed = [file.path for file in plan.pending if file.sha256 is None]
        digests = dict(zip(unhashed, file_digests(unhashed, threads, progress), strict=True))
        files = [replace(f, sha256=f.sha256 or digests[f.path]) for f in plan.pending]
        check_unchanged(paths)
        hub = Repository(plan.repository, plan.revision)
        if not plan.exists:
            hub.create(private=plan.private)
        hub.create_branch()
        additions = []
        for file in files:
            additions.append(hub.send(file.name, file.path, str(file.sha256)))
            check_unchanged([file.path])
        commit, address = hub.commit(additions, _message(files))
        check_unchanged(paths)
        _verify(plan, files, hub.files([file.name for file in files], commit))
    by_name = {file.name: file for file in files}
    return UploadResult(plan, tuple(by_name.get(file.name, file) for file in plan.files), address)


def _local_files(files: Sequence[str | Path], card: str | Path | None, folder: str | None) -> Iterator[UploadFile]:
    """Yield the files, held open, with their names in the repository. Raises FormatError, ResourceError."""
    places = set[Path]()
    for place in files:
        paths, missing = _complete(Path(place))
        for path in paths:
            if path.absolute() not in places:
                places.add(path.absolute())
                yield replace(_local_file(path, _repository_name(path, folder)), missing=missing)
    if card is not None:
        yield _local_file(_hold_file(Path(card)), CARD)


def _complete(path: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Return a file, or all shards of its model, after a check that no run is writing them.

    Of a first shard that is here alone, also the names of the other shards.
    """
    if path.name.endswith(_UNFINISHED):
        raise ResourceError(
            f"{path}: a file that a run has not finished, or its own; name the finished file", "QK-E408"
        )
    if path.suffix != ".gguf":
        return [_hold_file(path)], ()
    split = parse_split_path(path)
    model, n_missing = open_first_shard(path) if split is not None and split[1] == 0 else (open_gguf(path), 0)
    with model:
        if journal_path(Path(model.paths[0])).exists():
            raise ResourceError(
                f"{journal_path(Path(model.paths[0]))} exists: a run that replaces {path.name} is not finished; "
                "finish it with --resume",
                "QK-E408",
            )
        return [_hold_file(Path(p)) for p in model.paths], _other_shards(path) if n_missing else ()


def _other_shards(path: Path) -> tuple[str, ...]:
    """Return the names of all shards but the first, whose path is given."""
    split = parse_split_path(path)
    return () if split is None else tuple(split_path(split[0], i, split[2]).name for i in range(1, split[2]))


def _beside_shards(hub: Repository, file: UploadFile, folder: str | None, *, exists: bool) -> UploadFile:
    """Return a first shard with its place beside the other shards. Raises FormatError if the repository lacks them."""
    default = str(PurePosixPath(file.name).parent)
    folders = [folder] if folder is not None else [default, "", file.path.absolute().parent.name]
    for parent in dict.fromkeys(folders):
        names = {f"{parent}/{name}" if parent else name for name in file.missing}
        if exists and hub.files(sorted(names)).keys() == names:
            return replace(file, name=f"{parent}/{file.path.name}" if parent else file.path.name)
    raise FormatError(
        f"{file.path}: {len(file.missing)} shards are missing, and {hub.name} does not have them in "
        f"{' or '.join(repr(f or '.') for f in dict.fromkeys(folders))}: {file.missing[0]}, ..; download them, or name "
        "their folder by --folder",
        "QK-E104",
    )


def _hold_file(path: Path) -> Path:
    try:
        return File.hold(path)
    except OSError as e:
        raise ResourceError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None


def _local_file(path: Path, name: str) -> UploadFile:
    if not path.is_file():
        raise FormatError(f"{path}: not a regular file: name the files to upload", "QK-E120")
    nbytes = path.stat().st_size
    if nbytes > MAX_FILE:
        advice = f": quantkit split {path} --max-size 48G" if path.suffix == ".gguf" else ""
        raise ResourceError(f"{path}: {format_size(nbytes)}, and the Hub takes 50 GB at most{advice}", "QK-E120")
    return UploadFile(path, name, nbytes)


def _folder(text: str | None) -> str | None:
    """Return a folder of the repository, "" for its top."""
    if text is None:
        return None
    parts = PurePosixPath(text).parts
    if text.startswith("/") or ".." in parts or ".git" in parts:
        raise RecipeError(f"--folder {text}: give a folder within the repository", "QK-E203")
    return "/".join(parts)


def _repository_name(path: Path, folder: str | None) -> str:
    """Return the name of a file in the repository: shards in a folder of their model, other files at the top."""
    split = parse_split_path(path)
    parent = folder if folder is not None else Path(split[0]).name if split is not None else ""
    return f"{parent}/{path.name}" if parent else path.name


def _check_names(files: Sequence[UploadFile]) -> None:
    owners: dict[str, Path] = {}
    for file in files:
        if file.name in owners:
            raise RecipeError(
                f"{owners[file.name]} and {file.path} would both be {file.name} there: rename one", "QK-E403"
            )
        owners[file.name] = file.path


def _with_states(
    files: Sequence[UploadFile], remote: dict[str, RemoteFile], threads: int | None
) -> Iterator[UploadFile]:
    """Yield files with their states; only files with the size of the repository's are read."""
    similar = [f for f in files if f.name in remote and remote[f.name].nbytes == f.nbytes]
    digests = dict(zip([f.name for f in similar], file_digests([f.path for f in similar], threads), strict=True))
    for file in files:
        if file.name not in remote:
            yield file
        elif file.name in digests:
            is_equal = remote[file.name].matches(file.path, digests[file.name])
            yield replace(file, state=State.PRESENT if is_equal else State.DIFFERENT, sha256=digests[file.name])
        else:
            yield replace(file, state=State.DIFFERENT)


def _hold(stack: ExitStack, path: Path) -> None:
    """Keep other runs from writing a file; in a folder that cannot be written, none does."""
    lock_file = lock_path(Path(path))
    try:
        stack.callback(drop_lock, lock_file, take_lock(lock_file))
    except BlockingIOError:
        raise ResourceError(f"{path}: another run is writing it; wait for it", "QK-E404") from None
    except OSError:
        return


def _message(files: Sequence[UploadFile]) -> str:
    names = [file.name for file in files]
    return f"Upload {names[0]}" if len(names) == 1 else f"Upload {len(names)} files: {names[0]}, .."


def _verify(plan: UploadPlan, files: Sequence[UploadFile], remote: dict[str, RemoteFile]) -> None:
    """Raise FormatError if the Hub has not received the bytes of a file."""
    for file in files:
        if file.name not in remote or not remote[file.name].matches(file.path, str(file.sha256)):
            raise FormatError(
                f"{plan.repository}: {file.name} there does not have the SHA-256 of {file.path}: upload it again",
                "QK-E100",
            )
