"""Run the command line: ``python -m annotated_transformer``."""

from annotated_transformer.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
