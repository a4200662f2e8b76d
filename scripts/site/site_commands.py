"""Pages of the command line, one a command: the text of --help-all, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click

from quantkit.cli import COMMANDS, cli
from quantkit.cli._options import _HELP_ALL

#: Code in backticks, an option, or a letter that Markdown or HTML would take for markup.
_MARKUP = re.compile(r"(?P<code>`[^`]*`)|(?<![\w-])(?P<option>--?[a-zA-Z][\w-]*)|(?P<special>[<>&*\[\]])")


def markdown(text: str) -> str:
    """Return a line of help as Markdown: options as code, special characters escaped."""
    escapes = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "*": r"\*", "[": r"\[", "]": r"\]"}

    def marked(match: re.Match[str]) -> str:
        if match["special"]:
            return escapes[match["special"]]
        return match["code"] or f"`{match['option']}`"

    return _MARKUP.sub(marked, text)


class MarkdownFormatter(click.HelpFormatter):
    """A formatter of help that writes Markdown, with headings from ``level`` on."""

    def __init__(self, level: int) -> None:
        super().__init__(width=80)
        self.level = level

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f"```text\n{prog} {args}\n```\n")

    def write_heading(self, heading: str) -> None:
        self.write(f"{'#' * self.level} {heading[:1].upper()}{heading[1:]}\n\n")

    def write_text(self, text: str) -> None:
        for paragraph in re.split(r"\n\s*\n", text):
            self.write(_paragraph(paragraph) + "\n\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        for name, text in rows:
            # An option is a heading, so that the site's search finds it by itself.
            before, after = (f"{'#' * (self.level + 1)} ", "\n") if name.startswith("-") else ("", ":   ")
            self.write(f"{before}`{name}`\n{after}{markdown(' '.join(text.split())) or '-'}\n\n")


def _paragraph(text: str) -> str:
    """Return a paragraph; what click does not wrap is code."""
    lines = [line.strip() for line in text.strip().splitlines()]
    if lines and (lines[0] == "\b" or lines[0].startswith("quantkit ")):
        code = [line for line in lines if line != "\b"]
        return "\n".join(["```sh" if code[0].startswith("quantkit") else "```text", *code, "```"])
    return markdown(" ".join(lines))


def command_text(command: click.Command, context: click.Context, level: int) -> str:
    """Return the help of a command, and that of its commands under headings."""
    formatter = MarkdownFormatter(level)
    command.format_help(context, formatter)
    parts = [formatter.getvalue()]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            assert member is not None
            member_context = click.Context(member, info_name=name, parent=context)
            heading = f"{'#' * level} {member_context.command_path}\n\n"
            parts.append(heading + command_text(member, member_context, level + 1))
    return "\n".join(parts)


def command_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of every page of the command line."""
    root = click.Context(cli, info_name="quantkit")
    root.meta[_HELP_ALL] = True
    rows = [f"| [`{name}`]({name}.md) | {markdown(text)} |" for name, text in COMMANDS.items()]
    head = "Each page has the text of `quantkit COMMAND --help-all`, with all options by group."
    yield "index.md", "\n".join(["# Command line", "", head, "", "| command | |", "|---|---|", *rows, ""])
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        yield f"{name}.md", f"# quantkit {name}\n\n{command_text(command, context, 2)}"
