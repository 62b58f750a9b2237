"""``score`` prints the log-probability that a system gives to translations."""

import math

from annotated_transformer.cli.options import Score, Search
from annotated_transformer.cli.output import check_target, escape_text, has_bar, log, write_document
from annotated_transformer.cli.systems import open_systems
from annotated_transformer.cli.translate import files_of
from annotated_transformer.data.corpora import read_parallel
from annotated_transformer.engine.config import check_order
from annotated_transformer.engine.scoring import PairScore, score_pairs


def run(command: Score) -> int:
    """Score the pairs; the log-probabilities of the whole and of a token stand in one line."""
    folders = [command.model, *command.ensemble]
    own = [path for folder in folders for path in files_of(folder)]
    check_target("--output", command.output, command.source, command.target, *own)
    system, by = open_systems(folders, Search(**vars(command.weights)))
    sides = command.source, command.target
    check_order("SOURCE and TARGET", sides, "-".join(system.languages), remedy="")
    text = read_parallel(command.source, command.target, drop_blank=False)
    bar = has_bar(command.quiet, command.output)
    found = score_pairs(system, text.source, text.target, name=text.origin, progress=bar)
    lines = "".join(score_line(each, tokens=command.tokens) for each in found)
    write_document(lines, command.output)
    if not command.quiet:
        total = math.fsum(each.total for each in found)
        loss = -total / sum(len(each.tokens) for each in found)
        log(
            f"{len(found)} pair{'s' * (len(found) != 1)}, log-probability {total:.4f}, "
            f"{-loss:.4f} per token (perplexity {math.exp(min(loss, 700)):.3f}) by {by}"
        )
    return 0


def score_line(found: PairScore, *, tokens: bool) -> str:
    """Return the line of a pair: total, mean of a token, and each token if asked for."""
    columns = [f"{found.total:.4f}", f"{found.per_token:.4f}"]
    if tokens:
        pairs = zip(found.tokens, found.log_probabilities, strict=True)
        columns += [f"{escape_text(token)} {value:.4f}" for token, value in pairs]
    return "\t".join(columns) + "\n"
