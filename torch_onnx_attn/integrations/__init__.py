"""Bridges to other libraries. Each is imported by its name, and changes nothing until its `register` or `enable` is called."""
