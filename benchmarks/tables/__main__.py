"""The tables of README.md and of the pages in docs, made from benchmarks/results/*.json only.

    python -m benchmarks.tables [--write]

Without --write, names the files whose tables differ from the results, and exits with 1 if there is one. A table stands
between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; under it are the stamps of its rows.
"""

import sys

from benchmarks.common import command_line
from benchmarks.tables.render import FILES, render


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the files")
    options = parser.parse_args()
    rendered = {path: render(path.read_text()) for path in FILES}
    stale = {path: text for path, text in rendered.items() if text != path.read_text()}
    if options.write:
        for path, text in stale.items():
            path.write_text(text)
    elif stale:
        names = ", ".join(path.name for path in stale)
        sys.exit(f"{names}: tables differ from the results; run python -m benchmarks.tables --write")


if __name__ == "__main__":
    main()
