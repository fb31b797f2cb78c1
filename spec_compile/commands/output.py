"""The form in which commands print tables and errors."""

import sys

from rich.console import Console
from rich.table import Table

FILE_WIDTH = 200
"""Columns of a table in a file or a pipe, which gets whole lines."""


def print_table(table: Table) -> None:
    """Print a table on stdout, as wide as the terminal, or `FILE_WIDTH` columns wide if stdout is none."""
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def one_line(error: object) -> str:
    """The message of an exception, as one line."""
    return " ".join(str(error).split()) or type(error).__name__
