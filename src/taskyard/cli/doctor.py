"""`taskyard doctor`: prints the findings on a store and this machine."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.application.doctor import Finding, Level, diagnose
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.errors import DONE, REFUSED
from taskyard.cli.session import Target
from taskyard.cli.text import clean, counted

LEVEL_STYLES = {Level.OK: ("✔", "green"), Level.WARNING: ("!", "yellow"), Level.PROBLEM: ("✘", "bold red")}


def print_findings(target: Target, *, as_json: bool) -> int:
    """The exit code: 1 if there is a problem. A warning is not a problem."""
    findings = diagnose(target.store, target.app_name)
    has_problem = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        say_json({"ok": not has_problem, "findings": findings})
    else:
        show(make_console(), findings_view(findings))
    return REFUSED if has_problem else DONE


def findings_view(findings: Sequence[Finding]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        symbol, style = LEVEL_STYLES[finding.level]
        text = Text(clean(finding.text), "" if finding.level is Level.OK else style)
        if finding.hint:
            text.append(f"\n→ {clean(finding.hint)}", "default")
        table.add_row(Text(symbol, style), Text(finding.topic, "dim"), text)
    return Group(table, Text(), _verdict(findings))


def _verdict(findings: Sequence[Finding]) -> Text:
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if problems:
        return Text(counted(problems, "problem"), "bold red")
    if warnings:
        return Text(f"no problems, {counted(warnings, 'warning')}", "yellow")
    return Text("no problems found", "green")
