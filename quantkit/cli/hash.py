"""``quantkit hash``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, option, threads_option
from quantkit.cli._paths import MODEL, Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.errors import FormatError
from quantkit.hash import check_sums, hash, write_sums  # noqa: A004 - the word of the command line
from quantkit.names import printable


@click.command("hash", cls=GroupedCommand)
@click.argument("sources", metavar="FILE...", type=MODEL, nargs=-1)
@option("--xxh3", group="Content", is_flag=True, help="XXH3 of 128 bits instead of SHA-256: much faster.")
@option("--tensors", group="Content", is_flag=True, help="List every tensor.")
@option(
    "--check",
    group="Verification",
    type=Place(exists=True, dir_okay=False),
    metavar="SHA256SUMS",
    help="Verify FILEs, or all files, by this list of sha256sum's format.",
)
@option(
    "--write",
    group="Output",
    type=Place(dir_okay=False),
    metavar="SHA256SUMS",
    help="Write the SHA-256 of files, as sha256sum does.",
)
@option("--overwrite", group="Output", is_flag=True, help="Replace an existing file of --write and --json.")
@threads_option
@json_option()
def command(
    sources: tuple[Path, ...],
    xxh3: bool,
    tensors: bool,
    check: Path | None,
    write: Path | None,
    overwrite: bool,
    threads: int | None,
    json_to: JsonOutput,
) -> None:
    """Show the digests of GGUF files: of data, of metadata and of both.

    They do not depend on shards, padding or the order of tensors and keys: a split
    model has the digests of the joined one, and a new chat template leaves that of
    the data unchanged.

    \b
    quantkit hash model.gguf
    quantkit hash model-*.gguf --write SHA256SUMS
    quantkit hash --check SHA256SUMS
    """
    if check is not None and (write is not None or xxh3 or tensors):
        raise click.UsageError("--check takes only files: omit --write, --xxh3 and --tensors")
    if write is not None and (xxh3 or tensors):
        raise click.UsageError("--write lists the SHA-256 of files: omit --xxh3 and --tensors")
    if not sources and check is None:
        raise click.UsageError("give a file")
    with closing(Bar(quiet=json_to.only, unit="iB", unit_scale=True, unit_divisor=1024)) as bar:
        run: dict[str, Any] = {"threads": threads or None, "progress": lambda now: bar.update(*now)}
        if check is not None:
            _check(check, sources, json_to, run)
        elif write is not None:
            sums = write_sums(sources, write, overwrite=overwrite, **run)
            json_to.print(lambda: f"wrote {printable(str(write))}: {len(sums)} files", lambda: {"files": sums})
        else:
            _show(sources, "xxh3" if xxh3 else "sha256", tensors, json_to, run)


def _check(sums: Path, sources: tuple[Path, ...], json_to: JsonOutput, run: dict[str, Any]) -> None:
    checks = check_sums(sums, sources, **run)
    json_to.print(
        lambda: "\n".join(f"{printable(str(c.path))}: {'OK' if c.is_equal else 'FAILED'}" for c in checks),
        lambda: {
            "files": [
                {"path": str(c.path), "expected": c.expected, "sha256": c.digest, "equal": c.is_equal} for c in checks
            ]
        },
    )
    different = [c for c in checks if not c.is_equal]
    if different:
        raise FormatError(
            f"{different[0].path}: {len(different)} of {len(checks)} files differ from {sums}: copy or download them "
            "again",
            "QK-E100",
        )


def _show(sources: tuple[Path, ...], algorithm: str, tensors: bool, json_to: JsonOutput, run: dict[str, Any]) -> None:
    results = [hash(source, algorithm=algorithm, **run) for source in sources]
    rows = [
        (digest, name, printable(str(result.paths[0])))
        for result in results
        for name, digest in (
            ("data", result.data),
            ("metadata", result.metadata),
            ("model", result.model),
            *((printable(name), digest) for name, digest in (result.tensors.items() if tensors else ())),
        )
    ]
    json_to.print(
        lambda: table([algorithm, "of", "file"], rows, left=3),
        lambda: [
            {
                "files": [str(path) for path in result.paths],
                "algorithm": result.algorithm,
                "data": result.data,
                "metadata": result.metadata,
                "model": result.model,
                "tensors": dict(result.tensors),
            }
            for result in results
        ],
    )
