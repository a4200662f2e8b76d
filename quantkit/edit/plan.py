"""The plan of an edit: which keys change, which files are written, and how."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from quantkit.arguments import checked
from quantkit.edit.changes import Change, Editor
from quantkit.edit.checks import check_kinds, check_loading, check_templates, token_texts
from quantkit.errors import RecipeError, ResourceError, TypeNotSupported
from quantkit.formats.clone import can_clone
from quantkit.formats.files import hold
from quantkit.formats.gguf import Field, GGUFFile, open_first_shard, parse_split_path, split_path
from quantkit.formats.gguf.header import Header, check_room
from quantkit.formats.gguf.reader import read_shard
from quantkit.formats.outputs import check_apart, resolve_links
from quantkit.formats.remote import URL, locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.options.edit import EditOptions

#: Room for later edits in a file that is written again because a header grew.
DEFAULT_ROOM = 64 << 10
#: File systems share blocks of this size: data that moves by a multiple of it need not be copied.
_BLOCK = 4096


class Method(Enum):
    """The way an edit is written.

    CLONE is in place for everyone but the inode: the header of a clone changes, which is then renamed.
    """

    NOTHING = "nothing to do"
    CLONE = "in a clone"
    IN_PLACE = "in place"
    REWRITE = "written again"
    COPY = "copied"


@dataclass(frozen=True)
class EditPlan(HtmlTable):
    """The plan of an edit.

    Attributes:
        sources: the shards of the model.
        outputs: the file that each becomes; only the first changes, unless there is another output.
        changes: the keys that change.
        header: the new header of the first shard.
        present: its present header.
        nbytes: the bytes that are written.
        notes: what could not be checked.
        missing: shards of the model that are not here; none of them changes.
    """

    sources: tuple[Path, ...]
    outputs: tuple[Path, ...]
    changes: tuple[Change, ...]
    method: Method
    header: bytes
    present: bytes
    nbytes: int
    notes: tuple[str, ...]
    missing: int = 0

    def as_table(self) -> Table:
        """Return the changed keys with their values before and after."""
        rows = [(c.key, *(None if f is None else str(f.value)[:80] for f in (c.before, c.after))) for c in self.changes]
        return table_of("key, before, after", rows, f"{self.outputs[0]}: {self.method.value}")


@checked
def plan_edit(
    source: str | Path,
    output: str | Path | None = None,
    options: EditOptions | None = None,
    *,
    reserve: int | None = None,
    force: bool = False,
) -> EditPlan:
    """Plan an edit without writing anything; arguments and errors as for ``edit``."""
    options = options or EditOptions()
    if reserve is not None:
        check_room(reserve)
    _check_local(source)
    model, missing = open_first_shard(source)
    with model:
        if model.big_endian:
            raise TypeNotSupported(
                f"{source}: big-endian, and only little-endian headers are edited: quantkit quantize IN OUT COPY "
                "writes one",
                "QK-E300",
            )
        editor = Editor(Path(source), model.fields)
        editor.apply(options)
        changes = tuple(editor.changes())
        notes = _missing_note(model, missing)
        if not force:
            check_kinds(changes)
            check_loading(model, editor.fields, is_whole=not missing)
            notes += check_templates(Path(source), changes, dict(token_texts(editor.fields)))
        header = Header.from_shard(read_shard(model.paths[0], 0, header_only=True))
        sources, room = tuple(map(hold, model.paths)), model.room
    fields = list(editor.fields.values())
    present = header.encode_present()
    if output is not None:
        outputs = _outputs(Path(output), len(sources) + missing)[: len(sources)]
        check_apart(outputs, sources)
        method, new = Method.COPY, header.encode(fields, room=room if reserve is None else reserve)
    else:
        _check_editable(Path(source))
        outputs = (resolve_links(sources[0]),)
        method, new = _choose_method(header, fields, bool(changes), reserve)
        if method is Method.IN_PLACE and can_clone(sources[0]):
            method = Method.CLONE
    nbytes = 0 if method is Method.NOTHING else len(new)
    if method in (Method.REWRITE, Method.COPY):
        nbytes += sum(path.stat().st_size for path, _ in zip(sources, outputs, strict=False)) - len(present)
    return EditPlan(sources, outputs, changes, method, new, present, nbytes, tuple(notes), missing)


def _missing_note(model: GGUFFile, missing: int) -> list[str]:
    """Return a note on shards that are not here, whose tensors no check could see."""
    if not missing:
        return []
    return [
        f"{missing} of {missing + 1} shards are not here: only {model.paths[0].name} is edited, and that a runtime "
        "still loads the model was checked without the others' tensors"
    ]


def _check_local(source: str | Path) -> None:
    """Refuse a URL, with the commands by which the file is downloaded and, after the edit, written back."""
    url = locate(source)
    if not isinstance(url, URL):
        return
    folder, _, name = url.address.rpartition("/")
    split = parse_split_path(name)
    if split is not None:
        name = split_path(split[0], 0, split[2]).name
    advice = "download it first"
    if url.scheme == "hf":
        owner, _, place_in_owner = folder.removeprefix("hf://").partition("/")
        repository, _, parent = place_in_owner.partition("/")
        place, path = f"{owner}/{repository.partition('@')[0]}", f"{parent}/{name}" if parent else name
        advice = f"hf download {place} {path} --local-dir . && quantkit edit {path} .. && "
        advice += f"quantkit upload {place} {path} --folder {parent or '.'} --overwrite"
    elif url.scheme == "s3":
        advice = f"aws s3 cp {folder}/{name} {name} && quantkit edit {name} .. && aws s3 cp {name} {folder}/{name}"
    addition = "" if split is None else "; the other shards are not needed"
    raise ResourceError(f"{url}: edit changes local files: {advice}{addition}", "QK-E412")


def _choose_method(header: Header, fields: list[Field], has_changes: bool, reserve: int | None) -> tuple[Method, bytes]:
    """Return the method of a change under the same name, and the new header."""
    if not has_changes and reserve is None:
        return Method.NOTHING, header.encode_present()
    data = header.encode_to_size(fields) if reserve is None else None
    if data is not None:
        return Method.IN_PLACE, data
    return Method.REWRITE, _encode_aligned(header, fields, DEFAULT_ROOM if reserve is None else reserve)


def _encode_aligned(header: Header, fields: list[Field], room: int) -> bytes:
    """Return a header by which tensor data moves by whole blocks of the file system, with room unless it is 0."""
    if not room:
        return header.encode(fields)
    data = header.encode(fields, room=room)
    return header.encode(fields, room=room + (header.size - len(data)) % _BLOCK)


def _outputs(output: Path, count: int) -> tuple[Path, ...]:
    """Return the output of each shard."""
    if count == 1:
        return (resolve_links(output),)
    split = parse_split_path(output)
    if split is not None and split[1:] != (0, count):
        raise RecipeError(f"{output}: the model has {count} shards: give a name without -00001-of-00002", "QK-E203")
    prefix = str(output).removesuffix(".gguf") if split is None else split[0]
    return tuple(resolve_links(split_path(prefix, i, count)) for i in range(count))


def _check_editable(path: Path) -> None:
    """Refuse to edit a file whose name is the digest of its content: one of a cache of the hub."""
    real = resolve_links(path)
    if path.is_symlink() and real.parent.name == "blobs":
        raise ResourceError(
            f"{path}: a link into a cache of the hub, whose files must not change: write another file with -o",
            "QK-E403",
        )
    if real.is_file() and real.stat().st_nlink > 1:
        raise ResourceError(
            f"{path}: the file has several names (hard links), all of which would change: write another file with -o",
            "QK-E403",
        )
