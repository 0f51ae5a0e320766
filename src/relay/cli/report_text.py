"""A report on paper: tables on a terminal, plain lines in a file or a pipe, or JSON. Knows no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relay.models.report import Cell, Report, Section


def print_report(report: Report) -> None:
    """Sections, and at the end all problems or that there are none."""
    console = Console(soft_wrap=True) if not sys.stdout.isatty() else Console()
    for section in report.sections:
        if console.is_terminal:
            _print_table(console, section)
        else:
            _print_lines(section)
    for problem in report.problems:
        console.print(Text(f"problem: {problem}", style="red"))
    count = len(report.problems)
    if count:
        console.print(Text(f"{count} problem{'s' if count > 1 else ''}: it would not start", style="bold red"))
    else:
        console.print(Text(f"no problems: relay serve {report.model} would start", style="bold green"))


def print_json(report: Report, checkpoint: Path) -> None:
    """One object: `model`, `problems`, `settings`, and `sections` by title, rows by heading."""
    sections = {
        section.title: {
            "rows": [dict(zip(section.columns, row, strict=True)) for row in section.rows]
            if section.columns
            else [list(row) for row in section.rows],
            "remarks": list(section.remarks),
        }
        for section in report.sections
    }
    content = {
        "checkpoint": str(checkpoint),
        "model": report.model,
        "problems": list(report.problems),
        "settings": report.settings,
        "sections": sections,
    }
    print(json.dumps(content, indent=2, ensure_ascii=False))


def _print_table(console: Console, section: Section) -> None:
    width = max((len(row) for row in section.rows), default=len(section.columns))
    used = [i for i in range(width) if any(_shown(row[i]) for row in section.rows)]
    table = Table(title=section.title, title_justify="left", title_style="bold", show_header=bool(section.columns))
    for i in used:
        table.add_column(section.columns[i] if section.columns else "", overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(_shown(row[i])) for i in used))
    console.print(table)
    for remark in section.remarks:
        console.print(Text(remark))
    console.print()


def _print_lines(section: Section) -> None:
    print(f"{section.title}:")
    lines = [list(map(_shown, row)) for row in section.rows]
    lines = [list(section.columns), *lines] if section.columns else lines
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    for remark in section.remarks:
        print(f"  {remark}")


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else ""
    if isinstance(cell, float):
        return f"{cell:.6g}"
    if isinstance(cell, str):
        return cell.replace("\n", "\\n") if cell == cell.strip(" ") else repr(cell)
    return str(cell)
