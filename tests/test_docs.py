"""The Python blocks of the documentation run, in order, each page in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in p.read_text("utf-8")]


def blocks(text):
    """Each block with the number of its first line."""
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text[: found.start(1)].count("\n"), found.group(1)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names, ran = {"__name__": "page"}, 0
    for line, code in blocks(page.read_text("utf-8")):
        # a loop of 100 steps is as right after 2
        short = re.sub(r"range\(\d{3,}\)", "range(2)", code)
        short = re.sub(r"range\(16 \* i, 16 \* i \+ 16\)", "range(2 * i, 2 * i + 2)", short)
        exec(compile("\n" * line + short, str(page), "exec"), names)
        ran += 1
    assert ran == page.read_text("utf-8").count("```python") > 0


def test_pages_that_should_be_here_are():
    assert {"README.md", "migration.md", "diagnostics.md"} <= {p.name for p in PAGES}


def test_links_between_pages_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points at {target}"
