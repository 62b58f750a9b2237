"""``diagnose`` says what is wrong with a parallel text, without training."""

from annotated_transformer.cli.options import Diagnose
from annotated_transformer.cli.output import print_result
from annotated_transformer.data.corpora import Preparation, read_parallel
from annotated_transformer.data.diagnosis import ALONE, DRIFT, Finding, diagnose_corpus


def run(command: Diagnose) -> int:
    """Print a table of findings; they are no error unless ``--strict`` says so."""
    sides = command.valid_files
    valid = sides and read_parallel(*sides, split="val", drop_blank=False)
    limits = Preparation(max_words=command.max_words, max_ratio=command.max_ratio)
    pairs, found = diagnose_corpus(
        command.source, command.target, valid=valid, options=limits, examples=command.examples
    )
    title = f"{command.source} and {command.target}: {pairs:,} pair{'s' * (pairs != 1)}"
    title += "" if found else ", nothing found"
    print_result("\n".join([title, *findings_table(pairs, found)]))
    return int(command.strict and bool(found))


def findings_table(pairs: int, found: list[Finding]) -> list[str]:
    """Return the lines of the table: finding, number, share, lines; below each the remedy."""
    rows = []
    for each in found:
        share = "" if each.kind in (ALONE, DRIFT) else f"{each.count / max(pairs, 1):.2%}"
        lines = ", ".join(map(str, each.lines)) + (", …" if each.count > len(each.lines) else "")
        word = "line" if each.count == 1 else "lines"
        rows.append((each.kind, f"{each.count:,}", share, f"{word} {lines}" if each.lines else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)] if rows else []
    out = []
    for row, each in zip(rows, found, strict=True):
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]]
        out.append("  " + "  ".join(cells).rstrip())
        out += [f"      {text}" for text in (each.detail, each.remedy) if text]
    return out
