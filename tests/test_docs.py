"""The documentation: every Python block runs, in order, page by page; what is made from code is current; the site's pages all exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.docs import speed
from torch_onnx_attn import H200, explain

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+\.(?:md|svg|png))[^)]*\)")


def blocks(page: Path) -> list[str]:
    return PYTHON.findall(page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_python_block_runs(page: Path, tmp_path: Path) -> None:
    """In a process of its own, where nothing is imported yet and the current folder is empty."""
    script = tmp_path / f"{page.stem}_blocks.py"
    script.write_text("\n".join(blocks(page)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_what_is_made_from_code_is_current() -> None:
    run = subprocess.run([sys.executable, "tools/make_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_kernel_is_in_the_pages_about_kernels() -> None:
    Q = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    plan = explain(torch.ops.onnx_attn.attention.default, Q, Q, Q, machine=H200)
    for name in (*plan.refusals, plan.kernel):
        for page in ("support", "explain", "design"):
            assert f"`{name}`" in (ROOT / "docs" / f"{page}.md").read_text(), (name, page)


def test_the_site_lists_every_page() -> None:
    listed = set(re.findall(r"[\w]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed - {"CONTRIBUTING.md"} == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_a_group_of_lines_comes_from_the_newest_file_that_has_it(tmp_path: Path) -> None:
    for day, groups in {1: ("prefill", "mask"), 2: ("mask", "cache"), 3: ("cache",), 4: ()}.items():
        lines = [{"group": group, "name": f"{group} of day {day}"} for group in groups]
        (tmp_path / f"2026-01-0{day}.json").write_text(json.dumps({"lines": lines}))
    runs = speed.newest_runs(list(tmp_path.iterdir()))
    assert [run.groups for run in runs] == [("cache",), ("mask",), ("prefill",)]
    assert [record["name"] for run in runs for record in run.records] == ["cache of day 3", "mask of day 2", "prefill of day 1"]
