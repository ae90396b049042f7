"""Evaluates runs: what is drawn, how it is scored, the page that shows it. Begins at compare.py."""
