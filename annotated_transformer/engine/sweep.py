"""Grids of runs: one recipe, rows that change some of its options, and seeds for each row."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from annotated_transformer.engine.config import (
    Options,
    UsageError,
    check_options,
    check_sources,
    load_recipe,
    read_json,
)
from annotated_transformer.engine.typed import from_dict

SWEEPS = Path(__file__).with_name("sweeps")
KEYS = {"about": str, "recipe": str, "options": dict, "seeds": int, "rows": dict}
MOST_RUNS = 10_000
SAMPLE = 15  # tokens of a sentence, where the cost of a run is estimated


@dataclass(frozen=True)
class Grid:
    """The runs of a sweep."""

    name: str  #: Name of the sweep.
    #: The options of each row; those of the first are the base of all comparisons.
    rows: Mapping[str, Options]
    seeds: int  #: Number of seeds; the runs of different rows with one seed are paired.
    about: str = ""  #: A description, which may be empty.
    recipe: str = ""  #: The recipe of all rows.

    def runs(self) -> Iterator[tuple[str, int, Options]]:
        """Yield row, seed and options of each run: all rows with one seed, then the next."""
        for seed in range(self.seeds):
            for row, options in self.rows.items():
                yield row, seed, options.replace(seed=seed)

    def described(self) -> dict[str, Any]:
        """Return, as JSON values, the options that fix the results; a record keeps them."""
        return {row: options.replace(seed=0).described() for row, options in self.rows.items()}


def list_sweeps() -> list[str]:
    """Return the names of the package's sweeps."""
    return sorted(path.stem for path in SWEEPS.glob("*.json"))


def load_grid(sweep: str | Path, changes: Mapping[str, Any] | None = None) -> Grid:
    """Load a sweep of the package, or one from a file.

    Args:
        sweep: A name, see :func:`list_sweeps`; or a JSON file with ``recipe``, a name or a file;
            ``rows``, each a name with the options that it changes; optionally ``options`` of all
            rows, ``seeds``, their number (1), and ``about``, a description.
        changes: Options that the user sets for all rows, such as ``device``.

    Raises:
        UsageError: There is no such sweep, or a value in it is invalid.
    """
    path = SWEEPS / f"{sweep}.json"
    if Path(sweep).suffix or not path.exists():
        path = Path(sweep)
    if not path.exists():
        raise UsageError(
            f"{sweep}: neither a file nor a grid; choose among {', '.join(list_sweeps())}"
        )
    data = {"about": "", "options": {}, "seeds": 1, **read_json(path, str(sweep))}
    for key, kind in KEYS.items():
        if type(data.get(key)) is not kind:
            raise UsageError(f"{sweep}: {key!r} is missing or no {kind.__name__}; correct the file")
    if unknown := data.keys() - KEYS.keys():
        raise UsageError(f"{sweep}: {min(unknown)!r} is none of {', '.join(KEYS)}; mend the file")
    if not 0 < data["seeds"] * len(data["rows"]) <= MOST_RUNS:
        raise UsageError(f"{sweep}: must have 1 to {MOST_RUNS} runs, rows times seeds")
    try:
        base = load_recipe(data["recipe"])
    except UsageError as error:
        raise UsageError(f"{sweep}: {error}") from None
    rows = {}
    for row, own in data["rows"].items():
        place = f"{sweep}, row {row!r}"
        if not (row.isidentifier() and isinstance(own, dict)):
            raise UsageError(f"{place}: must be a name with an object of options; correct the file")
        own = {**data["options"], **own}
        if barred := {"seed", "steps"} & own.keys():
            raise UsageError(f"{place}: {min(barred)!r} is up to the sweep; leave it out")
        try:
            options = base.replace(**own)
            check_options(options)
            rows[row] = from_dict(Options, asdict(options))  # with JSON's values converted
            check_sources(rows[row].data)
        except (TypeError, UsageError) as error:
            raise UsageError(f"{place}: {error}; correct the file") from None
        if changes:
            rows[row] = rows[row].replace(**changes)
            check_sources(rows[row].data)
    return Grid(path.stem, rows, data["seeds"], data["about"], data["recipe"])
