"""``quantkit edit``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._metadata_diff import describe_change, field_dict, key_name
from quantkit.cli._options import SIZE, GroupedCommand, echo_notes, option
from quantkit.cli._pairs import Pair
from quantkit.cli._paths import MODEL, FileOf, Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import fold
from quantkit.edit import EditOptions, EditPlan, Method, ValueText, plan_edit, run_edit
from quantkit.edit.changes import TOKEN_NAMES
from quantkit.names import printable
from quantkit.units import format_size

_METADATA, _FILES = "Metadata and shards", "Files"


_SETTING, _RENAME, _TOKEN = Pair("KEY=VALUE"), Pair("KEY=NEW"), Pair("NAME=TOKEN")
_TEMPLATE = Pair("[NAME=]FILE", name_is_optional=True)


@click.command("edit", cls=GroupedCommand)
@click.argument("source", metavar="FILE.gguf", type=MODEL)
@option("-o", "--output", group="Output", type=FileOf(".gguf", local=True), help="Write another file.")
@option(
    "--set",
    "settings",
    group=_METADATA,
    multiple=True,
    type=_SETTING,
    metavar="KEY=VALUE",
    help="Set a key; a new one needs a type: KEY=str:VALUE. An array: KEY=[1,2]. The text of a file: KEY=@FILE. "
    "Repeatable.",
)
@option(
    "--remove",
    group=_METADATA,
    multiple=True,
    metavar="KEY|PREFIX*",
    help="Remove a key, or all that begin with PREFIX. Repeatable.",
)
@option("--rename", group=_METADATA, multiple=True, type=_RENAME, metavar="KEY=NEW", help="Rename a key. Repeatable.")
@option(
    "--chat-template",
    group=_METADATA,
    multiple=True,
    type=_TEMPLATE,
    metavar="[NAME=]FILE",
    help="Take the chat template from a Jinja file, or from tokenizer_config.json; NAME: a named one. Repeatable.",
)
@option(
    "--special-token",
    group=_METADATA,
    multiple=True,
    type=_TOKEN,
    metavar="NAME=TOKEN",
    help=f"Set a special token by its text or id. Names: {', '.join(TOKEN_NAMES)}. Repeatable.",
)
@option("--pre", group=_METADATA, metavar="NAME", help="Set the pre-tokenizer.")
@option("--name", group=_METADATA, metavar="TEXT", help="Set general.name.")
@option("--license", group=_METADATA, metavar="ID", help="Set general.license.")
@option("--drop-provenance", group=_METADATA, is_flag=True, help="Remove the keys that record how the file was made.")
@option(
    "--reserve",
    group=_FILES,
    type=SIZE,
    metavar="SIZE",
    help="Write the file again, with room for later edits in place. They are atomic with as much as the keys take and "
    "64K, the default.",
)
@option("--force", group=_METADATA, is_flag=True, help="Write changes that stop a runtime from loading the file.")
@option("--dry-run", group="Run", is_flag=True, help="Show the changes only.")
@option("--overwrite", group="Output", is_flag=True, help="Replace an existing output.")
@json_option()
def command(
    source: Path,
    output: Path | None,
    settings: Sequence[tuple[str, str]],
    remove: tuple[str, ...],
    rename: Sequence[tuple[str, str]],
    chat_template: Sequence[tuple[str, str]],
    special_token: Sequence[tuple[str, str]],
    pre: str | None,
    name: str | None,
    license: str | None,  # noqa: A002 - the word of the command line
    drop_provenance: bool,
    reserve: int | None,
    force: bool,
    dry_run: bool,
    overwrite: bool,
    json_to: JsonOutput,
) -> None:
    """Edit the metadata of a GGUF file.

    The file changes in place if the new header fits; otherwise a new file, with
    the tensor data copied, replaces it. Where the file system has clones (btrfs,
    XFS), a changed clone replaces the file instead. After a crash, quantkit
    restores the old header; other programs have the old or the new one where the
    room can hold both, and refuse the file where it cannot. Only the first shard
    of a split model changes. A key keeps its type.

    Changes that would stop llama.cpp or ik_llama.cpp from loading the file are
    refused, and so is a chat template that does not render.

    \b
    quantkit edit model.gguf --name "Tiny MoE" --license mit
    quantkit edit model.gguf --chat-template template.jinja --dry-run
    quantkit edit model.gguf --special-token 'eos=<|im_end|>' -o fixed.gguf
    quantkit edit model.gguf --remove 'quantize.imatrix.*' --set general.name=Tiny
    """
    options = EditOptions(
        drop_provenance=drop_provenance,
        remove=remove,
        rename=dict(rename),
        set={key: ValueText(text) for key, text in settings},
        chat_template={key: Place().convert(path, None, None) for key, path in chat_template},
        special_token={key: int(token) if token.isdecimal() else token for key, token in special_token},
        pre=pre,
        name=name,
        license=license,
    )
    plan = plan_edit(source, output, options, reserve=reserve, force=force)
    echo_notes(plan.notes)
    if not dry_run:
        with closing(Bar(quiet=json_to.only, unit="iB", unit_scale=True, unit_divisor=1024)) as bar:
            run_edit(plan, overwrite=overwrite, progress=lambda now: bar.update(*now))
    json_to.print(lambda: _text(plan, dry_run=dry_run), lambda: _as_dict(plan, dry_run=dry_run))


def _text(plan: EditPlan, *, dry_run: bool) -> str:
    lines = [
        fold(
            f"{_kind(c.before is None, c.after is None):<7}  {key_name(c.key)}: {describe_change(c.before, c.after)}", 9
        )
        for c in plan.changes
    ]
    return "\n".join([*lines, *_end(plan, dry_run=dry_run)])


def _kind(is_new: bool, is_removed: bool) -> str:
    return "added" if is_new else "removed" if is_removed else "changed"


def _end(plan: EditPlan, *, dry_run: bool) -> list[str]:
    """Return the lines on the files that are, or would be, written."""
    first, size = printable(str(plan.outputs[0])), format_size(plan.nbytes)
    if plan.method is Method.NOTHING:
        return [f"{first}: nothing to change"]
    if plan.method is Method.IN_PLACE:
        line = f"the header of {first}, {size}, in place{', atomically' if plan.is_atomic else ''}"
    elif plan.method is Method.CLONE:
        line = f"the header of {first}, {size}, in a clone that replaces the file"
    elif plan.method is Method.REWRITE:
        line = f"{first} whole, {size}{_growth(plan)}"
    else:
        line = f"{first}{f' and {len(plan.outputs) - 1} more shards' * (len(plan.outputs) > 1)}, {size}"
    lines = [f"{'would write' if dry_run else 'wrote'} {line}"]
    if not plan.is_atomic:
        room = f"--reserve {-(-plan.atomic_room >> 10)}K"
        lines.append(f"other programs refuse the file until its header is complete; {room} makes later edits atomic")
    n_unchanged = len(plan.sources) - 1 + plan.missing
    if plan.method is not Method.COPY and n_unchanged:
        lines.append(
            "the other shard of the model stays as before"
            if n_unchanged == 1
            else f"the other {n_unchanged} shards of the model stay as before"
        )
    return lines


def _growth(plan: EditPlan) -> str:
    growth = len(plan.header) - len(plan.present)
    if not growth:
        return ""
    direction = "larger" if growth > 0 else "smaller"
    return f": the new header is {format_size(abs(growth))} {direction}, including room for later edits"


def _as_dict(plan: EditPlan, *, dry_run: bool) -> dict[str, Any]:
    return {
        "command": "edit",
        "method": plan.method.name.lower(),
        "changes": [{"key": c.key, "before": field_dict(c.before), "after": field_dict(c.after)} for c in plan.changes],
        "files": [str(path) for path in (plan.outputs if plan.method is Method.COPY else plan.outputs[:1])],
        "missing_shards": plan.missing,
        "bytes": plan.nbytes,
        "atomic": plan.is_atomic,
        "notes": list(plan.notes),
        "written": not dry_run and plan.method is not Method.NOTHING,
    }
