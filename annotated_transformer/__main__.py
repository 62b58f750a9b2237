"""Run the command line: ``python -m annotated_transformer``.

The commands are defined in book/translation/command.md.
"""
# Written from book/_ext/export.py: edit it instead.

from annotated_transformer.translation.command import main

if __name__ == "__main__":
    raise SystemExit(main())
