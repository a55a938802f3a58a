"""The parts of the documentation that are made from code and from result files. `tools/make_docs.py` writes them."""

MADE = "<!-- made by tools/make_docs.py -->"
