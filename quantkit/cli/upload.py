"""``quantkit upload``."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, option, threads_option
from quantkit.cli._paths import FileOf, Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.extras import HUB
from quantkit.formats.hub_repository import show_progress
from quantkit.names import printable
from quantkit.units import format_size
from quantkit.upload import UploadPlan, UploadResult, plan_upload, run_upload


@click.command("upload", cls=GroupedCommand, extras=(HUB,))
@click.argument("repository", metavar="ORG/REPO")
@click.argument("files", metavar="FILE...", type=FileOf(".gguf", exists=True, local=True), nargs=-1)
@option(
    "--card",
    group="Files",
    type=Place(exists=True, dir_okay=False),
    metavar="FILE",
    help="Model card, uploaded as README.md.",
)
@option(
    "--folder",
    group="Output",
    metavar="FOLDER",
    help="Put all FILEs into this folder of the repository; . is its root.",
)
@option("--private", group="Output", is_flag=True, help="Make a new repository private.")
@option("--revision", group="Output", metavar="BRANCH", help="Upload to a branch, created if it does not exist.")
@option(
    "--overwrite",
    group="Output",
    is_flag=True,
    help="Replace remote files that differ, and an existing file of --json.",
)
@option("--dry-run", group="Run", is_flag=True, help="Show what would be sent, and send nothing.")
@threads_option
@json_option()
def command(
    repository: str,
    files: tuple[Path, ...],
    card: Path | None,
    folder: str | None,
    private: bool,
    revision: str | None,
    overwrite: bool,
    dry_run: bool,
    threads: int | None,
    json_to: JsonOutput,
) -> None:
    """Upload files to a model repository of the Hugging Face Hub.

    Shards go into a folder with the name of their model, and all of them are sent
    if one is named; other files go to the root. One commit makes all files visible.
    Files already there are not sent again, so an interrupted command can be repeated.

    Log in once: hf auth login, or set HF_TOKEN.

    \b
    quantkit upload YOU/Qwen3-30B-A3B-GGUF *.gguf SHA256SUMS --card README.md
    quantkit upload YOU/Qwen3-30B-A3B-GGUF model-Q8_0.gguf --dry-run
    """
    plan = plan_upload(
        repository,
        files,
        card=card,
        folder=folder,
        private=private,
        revision=revision,
        threads=threads or None,
    )
    rows = [(file.state.value, format_size(file.nbytes), printable(file.name)) for file in plan.files]
    result = None
    if not dry_run:
        show_progress(enabled=not json_to.only and sys.stderr.isatty())
        with closing(Bar(quiet=json_to.only, unit="iB", unit_scale=True, unit_divisor=1024)) as bar:
            result = run_upload(
                plan, overwrite=overwrite, threads=threads or None, progress=lambda now: bar.update(*now)
            )
    json_to.print(
        lambda: f"{table(['state', 'size', 'file'], rows, left=(0, 2))}\n{_end(plan, result)}",
        lambda: _as_dict(plan, result),
    )


def _end(plan: UploadPlan, result: UploadResult | None) -> str:
    """Return the line on what was, or would be, sent."""
    kind = "" if plan.exists else f"new {'private' if plan.private else 'public'} repository "
    place = f"{kind}{plan.repository}{f' ({plan.revision})' if plan.revision else ''}"
    if not plan.pending:
        return f"nothing to send: {place} has all files"
    amount = f"{len(plan.pending)} of {len(plan.files)} files, {format_size(plan.nbytes)}, to {place}"
    return f"would send {amount}" if result is None else f"sent {amount}: {result.commit}"


def _as_dict(plan: UploadPlan, result: UploadResult | None) -> dict[str, Any]:
    files = plan.files if result is None else result.files
    return {
        "command": "upload",
        "repository": plan.repository,
        "revision": plan.revision,
        "exists": plan.exists,
        "private": plan.private,
        "files": [
            {
                "path": str(file.path),
                "name": file.name,
                "bytes": file.nbytes,
                "state": file.state.value,
                "sha256": file.sha256,
            }
            for file in files
        ],
        "bytes": plan.nbytes,
        "written": result is not None and bool(plan.pending),
        "commit": None if result is None else result.commit,
    }
