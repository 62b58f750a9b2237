"""``compare`` scores two translations of one text."""

from typing import Any

from annotated_transformer.cli.options import Compare
from annotated_transformer.cli.output import print_result
from annotated_transformer.data.corpora import check_segments, read_side
from annotated_transformer.data.files import CorpusError
from annotated_transformer.translation.evaluation import paired_bootstrap


def run(command: Compare) -> int:
    """Print both scores, their difference, and its significance."""
    places = command.first, command.second, command.references
    first, second, (wanted, names, _) = map(read_side, places)  # once, because they may be pipes
    for place, (lines, own, _) in zip(places, (first, second), strict=False):
        check_segments(place, command.references, own, names)
        if len(lines) != len(wanted):
            raise CorpusError(
                f"{place} has {len(lines)} line{'s' * (len(lines) != 1)} and "
                f"{command.references} has {len(wanted)}; "
                "line n of one file must translate line n of the other"
            )
    how: dict[str, Any] = {"samples": command.samples, "lowercase": command.lowercase}
    found = paired_bootstrap(first[0], second[0], wanted, **how)
    print_result(
        f"{command.first}: BLEU {found.first:.2f}\n{command.second}: BLEU {found.second:.2f}\n"
        f"capitals {'do not count' if command.lowercase else 'count'}; difference "
        f"{found.second - found.first:+.2f} (second minus first); 95 % of {command.samples} "
        f"bootstrap samples lie from {found.low:+.2f} to {found.high:+.2f}; p = {found.p:.3f}"
    )
    return 0
