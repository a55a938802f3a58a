"""Writes the parts of the documentation that are made from code and from result files.

    python tools/make_docs.py            write them
    python tools/make_docs.py --check    name those that are out of date, exit code 1 if there are any

docs/support.md asks the planner, docs/images/*.svg the float64 reference; docs/speed.md and the table in README.md read
benchmarks/results/. Needs torch and a built torch_onnx_attn; the plots beside the result files are benchmarks/plot.py's.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # `tools` and an in-place build of torch_onnx_attn

from tools.docs import pictures, speed, support

ROOT = Path(__file__).resolve().parent.parent


def between(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced."""
    begin, end = f"<!-- begin {name}, made by tools/make_docs.py -->\n", f"<!-- end {name} -->"
    head, rest = text.split(begin)
    return head + begin + content + end + rest.split(end, 1)[1]


def made() -> dict[Path, str]:
    """Path -> the text that belongs there."""
    texts = {ROOT / "docs" / "support.md": support.page()}
    for name, (title, rows, keys, feature) in pictures.PICTURES.items():
        texts[ROOT / "docs" / "images" / f"{name}.svg"] = pictures.picture(title, rows, keys, feature)
    runs = speed.newest_runs(list((ROOT / "benchmarks" / "results").glob("nvidia-*-[0-9][0-9].json")))
    if runs:
        texts[ROOT / "docs" / "speed.md"] = speed.page(runs)
        readme = ROOT / "README.md"
        texts[readme] = between(readme.read_text(), "speed", speed.readme_table(runs))
    return texts


def main() -> int:
    check = "--check" in sys.argv[1:]
    texts = made()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(texts[path])
    print(f"{len(stale)} of {len(texts)} parts {'are out of date' if check else 'changed'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
